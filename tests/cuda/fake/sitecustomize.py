"""Loaded by the interpreter of a mover that is started with this folder in PYTHONPATH: it has a GPU that is not there,
and a UCX that takes its memory, which to UCX is the host's."""

import sys

if "hurray_server.mover" in sys.orig_argv:
    from support.fake_cuda import fake_cuda, let_ucx_take_it

    installed = fake_cuda()
    installed.__enter__()
    let_ucx_take_it(setattr)

"""The benchmark: real daemons and clients in processes of their own, against what the machine and others can do.

`runner.run` runs it, `report` says what came of it, `docs/performance.md` what is measured and how.
"""

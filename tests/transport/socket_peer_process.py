"""peer_process.py over sockets. Arguments: the configuration as JSON, then in TLS mode three paths of credentials."""

import json
import sys
from pathlib import Path

from peer_process import Peer

from hurray_wire.transport.tls import Credentials, SocketConfig, TcpTransport, TlsTransport

if __name__ == "__main__":
    config, paths = SocketConfig(**json.loads(sys.argv[1])), [Path(path) for path in sys.argv[2:]]
    Peer(TlsTransport(config, Credentials(*paths)) if paths else TcpTransport(config)).run()

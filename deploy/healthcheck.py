"""Whether the hurrayd of this container takes transfers: exit status 0 if it does.

Asks the gRPC health service at HEALTHCHECK_TARGET (default localhost:7411). A node with identities wants one to be
asked: HEALTHCHECK_TENANT is the path of a tenant's certificate and key without their endings, beside them ca.pem.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 4.0


def main() -> int:
    target, tenant = os.environ.get("HEALTHCHECK_TARGET", "localhost:7411"), os.environ.get("HEALTHCHECK_TENANT")
    if tenant is None:
        channel = grpc.insecure_channel(target)
    else:
        files = (Path(tenant).with_name("ca.pem"), Path(f"{tenant}.key"), Path(f"{tenant}.pem"))
        channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(*(file.read_bytes() for file in files)))
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            print(error.details())
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return int(answer.status != health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(main())

"""Whether the hurrayd of this container takes transfers: exit status 0 if so. HEALTHCHECK_URL: where it tells."""

import os
import sys
import urllib.error
import urllib.request

URL = os.environ.get("HEALTHCHECK_URL", "http://127.0.0.1:7413/readyz")
TIMEOUT_S = 4.0


def main() -> int:
    """Ask it; the exit status."""
    try:
        with urllib.request.urlopen(URL, timeout=TIMEOUT_S) as answer:  # noqa: S310 -- of this container
            print(answer.read().decode().strip())
    except urllib.error.HTTPError as error:
        print(error.read().decode().strip())
        return 1
    except OSError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

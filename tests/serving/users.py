"""The requests of fault_rig.py, made by a program that may run elsewhere: texts as JSON."""

import asyncio
import json
import sys

from tests.serving.fault_rig import complete_all

if __name__ == "__main__":
    url, fields = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps(asyncio.run(complete_all(url, **fields))))

"""A client of a c10d store, `store_client.py PORT`: prints its result, and retries at each line."""

import sys
from datetime import timedelta

from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=30))
store.set("key", "value")
store.multi_set(["a", "b"], ["1", "2"])
print(store.get("key"), store.multi_get(["a", "b"]), flush=True)
sys.stdin.readline()
try:
    store.get("key")
except Exception as error:
    print(type(error).__name__, flush=True)

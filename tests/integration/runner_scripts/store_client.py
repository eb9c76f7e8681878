"""A client of a c10d store, `store_client.py PORT`: prints its result, and retries at each line.

Like a store host it loads only the C++ part of torch, which has the store: all of torch takes
minutes on a busy machine.
"""

import sys
from datetime import timedelta

from rdzv.agent.job_programs.store_host import import_store_type

TCPStore = import_store_type(whole_torch=False)
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=90))
store.set("key", "value")
store.multi_set(["a", "b"], ["1", "2"])
print(store.get("key"), store.multi_get(["a", "b"]), flush=True)
sys.stdin.readline()
try:
    store.get("key")
except Exception as error:
    print(type(error).__name__, flush=True)

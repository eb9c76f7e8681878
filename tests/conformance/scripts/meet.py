"""A worker that meets the others by the given init_method, without using any variable."""

import os
import sys

import see  # Beside this file: it writes down what a worker sees.
import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=world_size)
total = torch.tensor(rank + 1)
dist.all_reduce(total)
see.say(f"hello sum={total.item()}")
dist.destroy_process_group()

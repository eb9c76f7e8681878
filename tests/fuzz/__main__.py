"""Fuzz surfaces of the product: `python -m tests.fuzz --seconds 600 --surfaces rpc,bytes`."""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys

from tests.fuzz import corpus
from tests.fuzz.engine import fuzz
from tests.fuzz.surfaces import SURFACES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each surface")
    parser.add_argument("--surfaces", default=",".join(SURFACES), help="comma between them")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    args = parser.parse_args()
    names = args.surfaces.split(",")
    if unknown := sorted(set(names) - set(SURFACES)):
        parser.error(f"{', '.join(unknown)}: no such surface; there are {', '.join(SURFACES)}")
    # Otherwise its own warnings, one for each refused input, would drown everything else.
    logging.getLogger().addHandler(logging.NullHandler())
    found = 0
    for name in names:
        surface = SURFACES[name]
        print(f"{name}: {surface.promise} (seed {args.seed})", flush=True)
        result = fuzz(surface, args.seconds, first_seed=args.seed)
        print(result, flush=True)
        for what, (steps, details) in result.found.items():
            found += 1
            kept = corpus.save(name, steps, what) if steps else "not kept: it is of no one input"
            print(f"FOUND {what}\n  {details}\n  {kept}", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    # gRPC's core logs malformed input.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(main())

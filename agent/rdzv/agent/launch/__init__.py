"""What a user asked to be launched, and what this node offers for it: ports, CPUs, GPUs."""

"""rdzvctl's commands, one file per subject. Each has options, a client call, and output."""

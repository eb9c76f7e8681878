"""rdzvctl's commands, one file per subject: each has options, a client call, and output."""

"""rdzvctl's commands, one file per subject: options, one client call, and the output."""

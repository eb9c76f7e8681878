"""The commands of rdzvctl, one file per subject: options, one client call, and the output."""

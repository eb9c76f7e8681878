"""A job's command line: torchrun's flags and ours, parsed without a node and without torch.

`declared_flags` lists the flags, `kinds` parses their values, and `flags` the command line. This
package is shared by rdzvrun, the daemon and `rdzvctl submit`, which refuse the same words in the
same way.
"""

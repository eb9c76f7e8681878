"""`rdzvctl`, the operator's command: queries rdzvd and prints the results for people and programs.

A command has three steps, each in its own module: `rdzv.client` sends the request and returns
values, `as_text` (`as_text_nodes`) or `as_json` formats them as lines, and `__main__` prints the
lines and chooses the exit code. `layout` handles widths and colors, and sanitizes external text.
All terminal output passes through it, or is JSON or YAML (`as_yaml`).

`job_request` parses jobs to submit, and `watch` follows them. It receives the
server's updates, and `live` renders them as a screen.

Each command's module is imported when the command is used, and by `--help`; it imports what the
command needs as it runs. A program that a prompt calls may take 100 ms.
"""

"""`rdzvctl`, the operator's command: queries rdzvd, and shows the answers to people and programs.

A command has three steps, each in its own module: `rdzv.client` sends the request and returns
values, `as_text` (`as_text_nodes`) or `as_json` turns these into lines, `__main__` prints them and
chooses the exit code. `layout` handles widths and colours, and makes every text from outside
harmless; all terminal output passes through it, or through JSON and the YAML that `as_yaml` makes
of it.

`job_request` and `job_file` read submitted jobs, and `follow` follows them. `watch` receives
the server's updates; `live` turns them into a screen.

`rdzvctl --help` is typed more often than anything else, so nothing but click is imported before
a command runs.
"""

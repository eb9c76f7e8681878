"""`rdzvctl`, the operator's command: asks rdzvd, and shows the answer to people and programs.

A command is three steps, each in its own module: `rdzv.client` asks and answers with values,
`as_text` or `as_json` turns these into lines, `__main__` prints them and picks the exit code.
`layout` knows widths and colours, and makes every text from outside harmless; nothing reaches
the terminal but through it or through JSON.

`rdzvctl --help` is typed more often than anything else, so nothing but click is imported before
a command runs.
"""

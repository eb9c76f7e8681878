"""`rdzvctl`, the operator's command: asks rdzvd, and shows the answer to people and programs.

A command is three steps, each in its own module: `rdzv.client` asks and answers with values,
`as_text` (`as_text_nodes`) or `as_json` turns these into lines, `__main__` prints them and picks
the exit code. `layout` knows widths and colours, and makes every text from outside harmless;
nothing reaches the terminal but through it, or through JSON and the YAML that `as_yaml` makes of
it.

What is submitted is read by `submit` and `job_file`, and followed by `follow`. `watch` takes in
what the server pushes; `live` makes a screen of it.

`rdzvctl --help` is typed more often than anything else, so nothing but click is imported before
a command runs.
"""

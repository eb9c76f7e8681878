#!/bin/sh
# An interpreter that can be told from the launcher's own.
BY_THE_OTHER=yes exec "$REAL_PYTHON" "$@"

"""The command line: each command is one library call. Contains no decoding logic."""

"""The command line: one module per command, settings from `molt.config`."""

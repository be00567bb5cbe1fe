"""What each command of the command line does; cli.py reads their options."""

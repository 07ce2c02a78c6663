"""What results look like on a terminal, a module for each kind of command."""

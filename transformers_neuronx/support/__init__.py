"""What any part may use: files, progress bars, arguments, turns of threads."""

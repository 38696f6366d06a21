"""One model on its devices: programs, caches, artifacts, and the rows that programs take."""

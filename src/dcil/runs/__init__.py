"""Run folders: what a training run leaves behind, and how it is read. Imports the kernel only."""

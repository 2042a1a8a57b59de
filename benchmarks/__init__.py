"""Speed, memory and accuracy beside torch's own attention and other packages; not in the wheel."""

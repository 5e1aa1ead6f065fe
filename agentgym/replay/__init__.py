"""A recorded episode played again, and continued in other ways from one of its turns."""

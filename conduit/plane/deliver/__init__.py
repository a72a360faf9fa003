"""Control point *delivery*: loaders and consumers, from the draw to the delivered batch."""

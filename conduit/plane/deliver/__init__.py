"""Control point *delivery*: loaders and consumers, from the draw to the batch that is handed out."""

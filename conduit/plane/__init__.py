"""The Experience Data Plane: the engine and its three control points, the only code that joins the layers below.

ingestion (Writer)    how rows enter, and when they become visible
placement             which pool a stream's pages live in
delivery (Loader)     how batches are made and handed out

Each is a small contract with a default and can be given another policy without touching the other two.
"""

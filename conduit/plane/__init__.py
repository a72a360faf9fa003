"""The experience data plane: the engine and its three control points. Only this package joins the layers below.

ingestion (Writer)    how rows enter, and when they become visible
placement             which pool a stream's pages live in
delivery (Loader)     how batches are made and handed out

Each control point is a contract (conduit.contracts) with a default; a caller can replace one without changing the other two.
"""

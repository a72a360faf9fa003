"""Offline data: tables filled from files and datasets, and written out to them.

    source    what can be read: steps with their schema, checked before any of them is read
    columns   the columns that a file has, and what they mean
    naming    which column has which field
    episodes  where episodes begin and end
    files     a set of files as one source
    npz       directories and files of numpy's archives
    parquet   directories and files of Parquet
    hdf5      directories and files of HDF5, D4RL's and robomimic's forms
    minari    Minari's datasets
    loading   into a table: `describe`, `table_for`, `load`
    saving    out of a table: `save`, `save_minari`

pyarrow, minari and h5py are imported when they are needed: pip install 'conduit-rl[offline]'. npz needs none of them.
The conventions for columns are in docs/offline.md.
"""

from conduit.offline.loading import Loaded as Loaded
from conduit.offline.loading import describe as describe
from conduit.offline.loading import load as load
from conduit.offline.loading import table_for as table_for
from conduit.offline.saving import Saved as Saved
from conduit.offline.saving import save as save
from conduit.offline.saving import save_minari as save_minari
from conduit.offline.source import Description as Description

__all__ = ["Description", "Loaded", "Saved", "describe", "load", "save", "save_minari", "table_for"]

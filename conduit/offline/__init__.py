"""Offline data: fills tables from files and datasets, and writes tables to them.

    source    the contract of a source: steps with their schema, checked before any step is read
    columns   the columns of a file and their meaning; the contract of a file
    naming    which column holds which field
    episodes  where episodes begin and end
    files     a set of files as one source
    npz       directories and files of numpy's archives
    parquet   directories and files of Parquet
    hdf5      directories and files of HDF5, D4RL's and robomimic's forms
    minari    Minari's datasets
    loading   into a table: `describe`, `table_for`, `load`
    saving    out of a table: `save`, `save_minari`

pyarrow, minari and h5py are imported when needed (pip install 'conduit-rl[offline]'); npz needs none of them. docs/offline.md has the
conventions for columns.
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

"""Checks of writers and windows against a table's declaration, made when a writer or loader is opened."""

from __future__ import annotations

from conduit.errors import CapacityError, ConfigError
from conduit.store.format.table_spec import Table, future_ticks, geometry, halo_ticks, least_ticks


def check_window(table: Table, history: int, future: int, *, crosses: bool) -> None:
    """Refuse a window that is wider than this table was created for.

    Args:
        table: The declaration.
        history: Ticks that the window needs before its anchor, the row it is built around.
        future: Ticks that the window needs after its anchor.
        crosses: Whether the window may cross from one episode into the next.

    Raises:
        ConfigError: The window is wider, or crosses episodes in a table that was created with within_episodes=True.
    """
    if crosses and table.within_episodes:
        raise ConfigError(
            "Expected a window within an episode, got a Rollout or a Sequence with across=True: create the table with "
            "within_episodes=False"
        )
    if crosses and future > table.max_length - 1:
        raise ConfigError(
            f"Expected a window across episodes of at most {table.max_length - 1} ticks behind its first, got {future}: create the "
            f"table with max_length={future + 1} (one tick more than it is long with next_obs=True)"
        )
    if history > table.max_stack - 1:
        raise ConfigError(
            f"Expected a stack of at most {table.max_stack}, got {history + 1}: create the table with "
            f"max_stack={history + 1}"
        )
    if future > future_ticks(table):
        raise ConfigError(
            f"Expected a window of at most {future_ticks(table)} ticks behind its first, got {future}: create the table "
            f"with max_n_step={future} (transitions) or max_length={future + 1} (sequences, episodes, rollouts; with "
            "next_obs=True they need one tick more than they are long)"
        )


def check_writer(table: Table, num_envs: int, *, finals: bool = False) -> None:
    """Refuse a writer whose ticks do not fit this table's pages.

    Args:
        table: The declaration.
        num_envs: Rows per tick.
        finals: Whether each row, also of the halo, may have a kept final observation.

    Raises:
        CapacityError: A page holds fewer than a halo (twice, with finals) and two ticks of `num_envs` rows.
    """
    halo = halo_ticks(table) * (2 if finals else 1)
    need = (halo + least_ticks(table)) * num_envs
    if finals and table.rollout_length is not None:
        need += num_envs
    page_rows = geometry(table).page_rows
    if need > page_rows:
        what = f"{halo_ticks(table)} ticks and as many final observations" if finals else f"{halo_ticks(table)} ticks"
        raise CapacityError(
            f"Expected pages of at least {need} rows for {num_envs} environments (a halo of {what}, and {least_ticks(table)} "
            f"ticks more), got {page_rows}: create the table with page_rows={16 * need} or num_envs={num_envs}"
        )

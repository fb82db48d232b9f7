"""Items: what a turn makes that clients see. An item's id is fixed by where it comes from, so a preview and its item agree."""

from uuid import UUID

from perdure.domain import ids


def item_id(turn_id: UUID, ordinal: int, try_no: int, block: int) -> UUID:
    """The id of block `block` of try `try_no` of a model step. A repeated call makes new items; nothing is rewritten."""
    return ids.derived(turn_id, "item", ordinal, try_no, block)


def call_id(item: UUID) -> str:
    """The id under which the model knows a call: ours, so that a provider that numbers its calls anew each time can't confuse them."""
    return "toolu_" + ids.token(item)

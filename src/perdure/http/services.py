"""What handlers may use. Made once by whoever puts the process together."""

import msgspec

from perdure.core.feed import Feeds
from perdure.core.submissions import Submissions
from perdure.ports.catalog import Catalog
from perdure.ports.environment import Environment
from perdure.ports.ledger import Ledger
from perdure.ports.model import ModelRouter


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """The ports behind every face."""

    ledger: Ledger
    catalog: Catalog
    feeds: Feeds
    models: ModelRouter
    environment: Environment
    submissions: Submissions
    version: str = "0"

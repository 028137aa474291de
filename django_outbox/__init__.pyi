# The public names, for type checkers; at run time they are imported at first use.

from . import inbox as inbox
from .events import GLOBAL as GLOBAL
from .events import Event as Event
from .events import current_event as current_event
from .events.typed import event as event
from .exceptions import BrokerUnavailable as BrokerUnavailable
from .exceptions import DuplicateEvent as DuplicateEvent
from .exceptions import InvalidEvent as InvalidEvent
from .exceptions import ListenerAlreadyRegistered as ListenerAlreadyRegistered
from .exceptions import ListenerTimeout as ListenerTimeout
from .exceptions import NoActiveTransaction as NoActiveTransaction
from .exceptions import OutboxError as OutboxError
from .exceptions import PayloadError as PayloadError
from .exceptions import PayloadTooLarge as PayloadTooLarge
from .exceptions import RetryAfter as RetryAfter
from .exceptions import Unrecoverable as Unrecoverable
from .exceptions import UnroutableEvent as UnroutableEvent
from .inspection.fate import Fate as Fate
from .inspection.fate import fate as fate
from .listeners.outcomes import Dead as Dead
from .listeners.outcomes import Defer as Defer
from .listeners.outcomes import Done as Done
from .listeners.outcomes import Failure as Failure
from .listeners.registry import ANY as ANY
from .listeners.registry import listener as listener
from .listeners.retry import Exponential as Exponential
from .listeners.retry import Fixed as Fixed
from .listeners.retry import Jittered as Jittered
from .listeners.retry import Linear as Linear
from .listeners.retry import RetryPolicy as RetryPolicy
from .worker.drain import drain as drain
from .worker.worker import Worker as Worker
from .writing.cancel import cancel as cancel
from .writing.cancel import reschedule as reschedule
from .writing.signal_bridge import OutboxSignal as OutboxSignal
from .writing.write import awrite as awrite
from .writing.write import awrite_many as awrite_many
from .writing.write import write as write
from .writing.write import write_many as write_many

__version__: str

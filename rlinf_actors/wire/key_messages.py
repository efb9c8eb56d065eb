"""Control messages about keys and join tokens, between members or the command line and the head. No secrets."""

from __future__ import annotations

from typing import Literal, Union

from rlinf_actors.wire import values
from rlinf_actors.wire.bounds import Address, Few, FewOf, Name, OfCluster, Text
from rlinf_actors.wire.protocol import ControlMessage, Number

KeyRole = Literal["agent", "driver", "viewer"]
"""Roles that a listed key can have."""


class KeyLimits(values.Value, frozen=True):
    """What the use of a key is limited to. Each limit is optional. A join token passes its limits on to the key.

    Attributes:
        user: the user of the machine whose agentd may use the key, "" for any. Keys of one node for two users are keys
            of two members.
        node_id: id of the only node that the key may speak for, "" for any.
        until: time at which the key expires, in seconds since the epoch by the head's clock; None for never.
        nodes: patterns of the nodes on which a driver may launch: of names, or of LABEL=VALUE; none for all nodes.
        groups: the groups of drivers to which a driver belongs, as rules of nodes name them.
    """

    user: Name = ""
    node_id: Name = ""
    until: Union[Number, None] = None
    nodes: FewOf[Name] = ()
    groups: FewOf[Name] = ()


class KeyState(values.Value, frozen=True):
    """One key or join token that the head has listed. Times are in seconds since the epoch, by the head's clock.

    Attributes:
        public: the public key, 40 characters of Z85.
        role: role of the key's holder; for a join token, the role that the holder of the token will get.
        name: name of that node, driver or viewer.
        added_at: time at which the key was listed.
        added_by: name of the person or program that listed it.
        token: True for a join token, which only permits its holder to list another key.
        expires_at: time at which a join token, or a key that was replaced, expires; None for never.
        ended_at: time at which the key became invalid, None for a valid key.
        why: reason why the key became invalid.
        limits: what the use of the key is limited to, also until when.
        replaces: True for a join token whose key may replace a valid key of its member.
    """

    public: Name
    role: KeyRole
    name: Name
    added_at: Number
    added_by: Name
    token: bool = False
    expires_at: Union[Number, None] = None
    ended_at: Union[Number, None] = None
    why: Text = ""
    limits: KeyLimits = KeyLimits()
    replaces: bool = False


class Enroll(ControlMessage, frozen=True):
    """Add the sender's key `public` to the head's list. Answered by Enrolled; the join token is then used up.

    This is the only request that the holder of a join token may send.

    `node_id` and `user` limit the key to this node and user, where the join token does not say which; "" for no limit.
    """

    public: Name
    node_id: Name = ""
    user: Name = ""


class RotateKey(ControlMessage, frozen=True):
    """Replace the key of the sending agentd or driver by `public`. Answered by Enrolled.

    The old key, with which this request is sent, stays valid for `keep_s` seconds for processes that still use it.
    """

    public: Name
    keep_s: Number = 0.0


class Enrolled(ControlMessage, frozen=True):
    """Reply to Enroll and RotateKey: the key is listed under this role and name.

    `warning` is text if the list could not be saved, so that a restarted head would not know the key.
    """

    role: KeyRole
    name: Name
    warning: Text = ""


class AddKey(ControlMessage, frozen=True):
    """Add a key or join token to the head's list. Answered by Keys with it. `rlinf-actors keys enroll` sends it.

    Refused if the name has a valid key for this user. A valid join token of the name and user becomes invalid.

    Attributes:
        public: the public key, 40 characters of Z85.
        role: role of the key's holder.
        name: name of that node, driver or viewer.
        by: the sender's name, for people.
        token_s: None if `public` is the final key. For a join token: seconds for which it is valid, at most 900. Its
            holder sends the final key by Enroll.
        limits: what the use of the key is limited to.
        valid_s: seconds until the key expires, None for never; the head sets `limits.until`.
        replaces: True if the key may replace a valid key of the name and user, which then stays valid for a day.
    """

    public: Name
    role: KeyRole
    name: Name
    by: Name
    token_s: Union[Number, None] = None
    limits: KeyLimits = KeyLimits()
    valid_s: Union[Number, None] = None
    replaces: bool = False


class RevokeKey(ControlMessage, frozen=True):
    """Revoke all keys and join tokens of a name and end their sessions. Answered by Keys with the revoked keys.

    `role` and `user` limit this to keys of one role and user; None revokes keys of all. `by` is the sender's name, for
    people.
    """

    name: Name
    by: Name
    role: Union[KeyRole, None] = None
    user: Union[Name, None] = None


class GetKeys(ControlMessage, frozen=True):
    """Return all keys and join tokens, ended ones included. Answered by Keys."""


class Keys(ControlMessage, frozen=True):
    """Reply to GetKeys, AddKey and RevokeKey.

    Attributes:
        keys: all keys after GetKeys, the new key after AddKey, the revoked keys after RevokeKey.
        head: the head's public key, "" for a head without keys.
        listens: TCP endpoints on which the head listens.
        at: the head's clock, in seconds since the epoch.
        warning: text if the change is in effect but could not be saved, so that a restarted head would not know it.
    """

    keys: OfCluster[KeyState]
    head: Name
    listens: Few[Address]
    at: Number
    warning: Text = ""

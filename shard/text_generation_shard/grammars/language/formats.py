"""The formats of strings as regular expressions, with the same texts as llguidance's: the shortest
ending of a text must be right from every beginning that the matcher allows."""

_HEX = "[0-9a-fA-F]"
_LONG_MONTH = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH = "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(0[1-9]|[12][0-9])"
_DATE = f"[0-9]{{4}}-({_LONG_MONTH}|{_SHORT_MONTH}|{_FEBRUARY})"
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:([0-5][0-9]|60)(\.[0-9]+)?([zZ]|[+-]{_HOUR})"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_CLOCK = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_OCTET = "([0-9]|[1-9][0-9]|1[0-9][0-9]|2[0-4][0-9]|25[0-5])"
_IPV4 = rf"({_OCTET}\.){{3}}{_OCTET}"
_GROUP = f"{_HEX}{{1,4}}"
# Eight groups; or at most seven, of which `first` are before `::`.
_IPV6 = "|".join(
    [
        f"({_GROUP}:){{7}}({_GROUP}|:)",
        f"::(({_GROUP}:){{0,6}}{_GROUP})?",
        *(
            f"({_GROUP}:){{{first}}}:(({_GROUP}:){{0,{6 - first}}}{_GROUP})?"
            for first in range(1, 7)
        ),
    ]
)
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
_SHORT_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_PLAIN = r"a-zA-Z0-9\-._~!$&'()*+,;="
_ESCAPE = f"%{_HEX}{{2}}"
_SIGN = f"([{_PLAIN}:@]|{_ESCAPE})"
_HOST = rf"(\[({_IPV6}|v{_HEX}+\.[{_PLAIN}:]+)\]|([{_PLAIN}]|{_ESCAPE})*)"
_AUTHORITY = f"(([{_PLAIN}:]|{_ESCAPE})*@)?{_HOST}(:[0-9]*)?"
_PATH = f"(//{_AUTHORITY}(/{_SIGN}*)*|/?{_SIGN}+(/{_SIGN}*)*|/?)"
_REST = f"([{_PLAIN}:@/?]|{_ESCAPE})*"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": f"P({_DAYS}({_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": rf"{_ATOM}(\.{_ATOM})*@({_LABEL}(\.{_LABEL})*|\[{_IPV4}\])",
    "hostname": rf"{_SHORT_LABEL}(\.{_SHORT_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": f"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+\-.]*:{_PATH}(\?{_REST})?(#{_REST})?",
}

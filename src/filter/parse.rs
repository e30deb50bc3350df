//! Reading a filter from a text.

use std::str::FromStr;

use super::Filter;
use super::lexer::{Kind, Token, tokens};
use super::primitive::{At, End, Side};
use super::read::{Ends, What, read, shown};
use super::value::{PROTOCOLS, Prefix, Protocol};
use crate::error::{Error, ErrorKind};

/// How many pairs of parentheses may be within each other.
const DEEPEST: usize = 64;
/// How many near words an error offers.
const NEAR_WORDS: usize = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keyword {
    Ipv4,
    Ipv6,
    Protocol(Protocol),
    End(End),
    Side(Side),
    Address,
    Port,
    What(What),
}

const KEYWORDS: [(&str, Keyword); 28] = [
    ("ip", Keyword::Ipv4),
    ("ip4", Keyword::Ipv4),
    ("ipv4", Keyword::Ipv4),
    ("ip6", Keyword::Ipv6),
    ("ipv6", Keyword::Ipv6),
    ("src", Keyword::End(End::Source)),
    ("dst", Keyword::End(End::Destination)),
    ("local", Keyword::Side(Side::Local)),
    ("remote", Keyword::Side(Side::Remote)),
    ("host", Keyword::Address),
    ("net", Keyword::Address),
    ("port", Keyword::Port),
    ("portrange", Keyword::Port),
    ("proto", Keyword::What(What::Protocol)),
    ("dev", Keyword::What(What::Interface(At::Now))),
    ("ifname", Keyword::What(What::Interface(At::Now))),
    ("iif", Keyword::What(What::Interface(At::Received))),
    ("netns", Keyword::What(What::Netns)),
    ("pid", Keyword::What(What::Pid)),
    ("tid", Keyword::What(What::Tid)),
    ("comm", Keyword::What(What::Comm)),
    ("cgroup", Keyword::What(What::Cgroup)),
    ("mark", Keyword::What(What::Mark)),
    ("len", Keyword::What(What::Length)),
    ("length", Keyword::What(What::Length)),
    ("less", Keyword::What(What::AtMost)),
    ("greater", Keyword::What(What::AtLeast)),
    ("pcap", Keyword::What(What::Pcap)),
];

fn keyword(word: &str) -> Option<Keyword> {
    let known = KEYWORDS.iter().find(|(name, _)| *name == word).map(|(_, keyword)| *keyword);
    known.or_else(|| Protocol::named(word).map(Keyword::Protocol))
}

/// `; did you mean ...?`, if a word looks like one that a filter has. These are too short for the measure that serves
/// for names: one slip in three letters is near, two in six.
fn near_keywords(word: &str) -> String {
    let operators = ["and", "or", "not"].into_iter();
    let names = KEYWORDS.iter().map(|(name, _)| *name).chain(PROTOCOLS.iter().map(|(_, name)| *name));
    let slips = names.chain(operators).map(|name| (strsim::osa_distance(word, name), name));
    let mut near: Vec<_> = slips.filter(|(slips, name)| slips * 3 <= name.len().min(word.len())).collect();
    near.sort();
    near.truncate(NEAR_WORDS);
    if near.is_empty() {
        return String::new();
    }
    let names: Vec<_> = near.into_iter().map(|(_, name)| name).collect();
    format!("; did you mean `{}`?", names.join("` or `"))
}

/// What stands before a value, and is repeated where nothing does.
#[derive(Debug, Clone)]
struct Qualifier {
    /// The last word of it.
    word: String,
    /// The protocol or the IP version that was asked for as well.
    of: Option<Filter>,
    what: What,
}

/// In tcpdump's words, see [`Filter`](Filter#in-words).
impl FromStr for Filter {
    type Err = Error;

    /// # Errors
    ///
    /// [`FilterSyntax`](ErrorKind::FilterSyntax) says which word is wrong, where it is, and what may have been meant.
    fn from_str(text: &str) -> Result<Self, Error> {
        let mut parser = Parser { text, tokens: tokens(text)?, next: 0, depth: 0, last: None };
        let filter = parser.expression(None)?;
        match parser.peek() {
            None => Ok(filter),
            Some(token) if token.kind == Kind::Close => Err(parser.fail(&token, "this `)` closes nothing")),
            Some(token) => {
                let shown = shown(token.text);
                let near = if keyword(token.text).is_some() { String::new() } else { near_keywords(token.text) };
                let reason = format!("`and` or `or` is missing before `{shown}`{near}");
                Err(parser.fail(&token, reason))
            }
        }
    }
}

/// The error for what is at this byte of the text.
pub(super) fn fail(text: &str, start: usize, word: &str, reason: impl Into<String>) -> Error {
    let before = text.get(..start).unwrap_or(text).chars().count();
    ErrorKind::FilterSyntax { position: before + 1, word: word.to_owned(), reason: reason.into() }.into()
}

struct Parser<'a> {
    text: &'a str,
    tokens: Vec<Token<'a>>,
    /// The token that comes next.
    next: usize,
    /// How many parentheses are open.
    depth: usize,
    /// What a value without words before it is compared with.
    last: Option<Qualifier>,
}

impl<'a> Parser<'a> {
    /// Terms that are joined, from the left. With a qualifier there are only its values.
    fn expression(&mut self, of: Option<&Qualifier>) -> Result<Filter, Error> {
        let mut filter = self.term(of)?;
        loop {
            match self.peek().map(|token| token.kind) {
                Some(Kind::And) => {
                    self.next += 1;
                    filter = filter.and(self.term(of)?);
                }
                Some(Kind::Or) => {
                    self.next += 1;
                    filter = filter.or(self.term(of)?);
                }
                _ => return Ok(filter),
            }
        }
    }

    fn term(&mut self, of: Option<&Qualifier>) -> Result<Filter, Error> {
        let mut negated = false;
        while self.take(&Kind::Not) {
            negated = !negated;
        }
        let filter = if self.peek().is_some_and(|token| token.kind == Kind::Open) {
            let filter = self.group(of)?;
            // As in tcpdump, what was said within parentheses isn't repeated behind them.
            self.last = None;
            filter
        } else if let Some(qualifier) = of {
            self.value(qualifier, None)?
        } else {
            self.primitive()?
        };
        Ok(if negated { filter.not() } else { filter })
    }

    /// An expression in parentheses, the first of which comes next.
    fn group(&mut self, of: Option<&Qualifier>) -> Result<Filter, Error> {
        let Some(open) = self.peek() else {
            return Err(self.fail_at_end("`(` is missing"));
        };
        if self.depth == DEEPEST {
            return Err(self.fail(&open, format!("more than {DEEPEST} pairs of parentheses are within each other")));
        }
        self.next += 1;
        self.depth += 1;
        let filter = self.expression(of)?;
        self.depth -= 1;
        match self.peek() {
            Some(token) if token.kind == Kind::Close => {
                self.next += 1;
                Ok(filter)
            }
            Some(token) => {
                let reason = format!("`and`, `or` or `)` is missing before `{}`", shown(token.text));
                Err(self.fail(&token, reason))
            }
            None => Err(self.fail(&open, "this `(` isn't closed")),
        }
    }

    fn primitive(&mut self) -> Result<Filter, Error> {
        let token = match self.peek() {
            Some(token) if matches!(token.kind, Kind::Word | Kind::Quoted(_)) => token,
            Some(token) => {
                let reason = format!("something to filter by is missing before `{}`", token.text);
                return Err(self.fail(&token, reason));
            }
            None => return Err(self.fail_at_end("something to filter by is missing")),
        };
        let known = if token.kind == Kind::Word { keyword(token.text) } else { None };
        let Some(keyword) = known else {
            return self.bare(&token);
        };
        self.next += 1;
        let of = match keyword {
            Keyword::Ipv4 => Filter::ipv4(),
            Keyword::Ipv6 => Filter::ipv6(),
            Keyword::Protocol(protocol) => Filter::protocol(protocol),
            keyword => return self.qualified(keyword, &token, None),
        };
        // What may follow a protocol without `and`.
        let is_version = matches!(keyword, Keyword::Ipv4 | Keyword::Ipv6);
        match self.peek_keyword() {
            Some((next, token)) if next.follows_protocol(is_version) => {
                self.next += 1;
                self.qualified(next, &token, Some(of))
            }
            _ => {
                self.last = None;
                Ok(of)
            }
        }
    }

    /// A value without words before it: those of the last one are repeated. An address needs none.
    fn bare(&mut self, token: &Token<'a>) -> Result<Filter, Error> {
        let word = shown(token.text);
        let Some(last) = self.last.clone() else {
            if token.text.parse::<Prefix>().is_ok() {
                let what = What::Address(Ends::One(End::Either));
                return self.value(&Qualifier { word: "host".to_owned(), of: None, what }, None);
            }
            let reason = match near_keywords(token.text).as_str() {
                "" => format!("`{word}` isn't known here; `port`, `host`, `dev`, `tcp` and others say what is meant"),
                near => format!("`{word}` isn't known here{near}"),
            };
            return Err(self.fail(token, reason));
        };
        let near = if token.kind == Kind::Word { near_keywords(token.text) } else { String::new() };
        // Any word will do for these, also one that is misspelt.
        if matches!(last.what, What::Comm | What::Interface(_)) && !near.is_empty() {
            let before = &last.word;
            let reason = format!("`{word}` isn't known here{near} Or write `{before} {word}`");
            return Err(self.fail(token, reason));
        }
        self.value(&last, Some(&near))
    }

    /// What follows a word that says what is compared.
    fn qualified(&mut self, keyword: Keyword, token: &Token<'a>, of: Option<Filter>) -> Result<Filter, Error> {
        let mut word = token.text;
        let what = match keyword {
            Keyword::What(What::Netns) => match self.peek() {
                Some(token) if token.kind == Kind::Word && token.text == "pid" => {
                    self.next += 1;
                    word = token.text;
                    What::NetnsOfPid
                }
                _ => What::Netns,
            },
            Keyword::What(what) => what,
            Keyword::Address => What::Address(Ends::One(End::Either)),
            Keyword::Port => What::Port(Ends::One(End::Either)),
            Keyword::End(end) => {
                let ends = self.other_end(end);
                match self.peek_keyword() {
                    Some((Keyword::Port, token)) => {
                        self.next += 1;
                        word = token.text;
                        What::Port(ends)
                    }
                    Some((Keyword::Address, token)) => {
                        self.next += 1;
                        word = token.text;
                        What::Address(ends)
                    }
                    // `host` may be left out.
                    _ => What::Address(ends),
                }
            }
            Keyword::Side(side) => match self.peek_keyword() {
                Some((Keyword::Port, token)) => {
                    self.next += 1;
                    word = token.text;
                    What::SidePort(side)
                }
                _ => {
                    let reason = format!("`{word}` is only for ports: `{word} port 53`");
                    return Err(self.fail(token, reason));
                }
            },
            Keyword::Ipv4 | Keyword::Ipv6 | Keyword::Protocol(_) => {
                let reason = format!("`and` or `or` is missing before `{word}`");
                return Err(self.fail(token, reason));
            }
        };
        let qualifier = Qualifier { word: word.to_owned(), of, what };
        if self.peek().is_some_and(|token| token.kind == Kind::Open) {
            let filter = self.group(Some(&qualifier))?;
            self.last = Some(qualifier);
            return Ok(filter);
        }
        self.value(&qualifier, None)
    }

    /// Which ends `src` or `dst` stands for, with what follows: `src or dst`, `src and dst`.
    fn other_end(&mut self, first: End) -> Ends {
        let [join, other] = [0, 1].map(|ahead| self.tokens.get(self.next + ahead));
        let is_other = other.is_some_and(|token| {
            let end = if token.kind == Kind::Word { keyword(token.text) } else { None };
            matches!(end, Some(Keyword::End(end)) if end != first)
        });
        let ends = match join.map(|token| &token.kind) {
            Some(Kind::And) if is_other => Ends::Both,
            Some(Kind::Or) if is_other => Ends::One(End::Either),
            _ => return Ends::One(first),
        };
        self.next += 2;
        ends
    }

    /// A value, which comes next. If the words before it are repeated, what else it may be is known.
    fn value(&mut self, qualifier: &Qualifier, near: Option<&str>) -> Result<Filter, Error> {
        let word = &qualifier.word;
        let token = match self.peek() {
            Some(token) if matches!(token.kind, Kind::Word | Kind::Quoted(_)) => token,
            Some(token) => {
                let reason = format!("{} is missing between `{word}` and `{}`", qualifier.what, token.text);
                return Err(self.fail(&token, reason));
            }
            None => return Err(self.fail_at_end(format!("{} is missing behind `{word}`", qualifier.what))),
        };
        self.next += 1;
        let filter = read(qualifier.what, &token)
            .map_err(|reason| self.fail(&token, format!("{reason}{}", near.unwrap_or_default())))?;
        if let Some(complaint) = filter.complaint() {
            return Err(self.fail(&token, complaint));
        }
        self.last = Some(qualifier.clone());
        Ok(match &qualifier.of {
            Some(of) => of.clone().and(filter),
            None => filter,
        })
    }

    fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.next).cloned()
    }

    fn peek_keyword(&self) -> Option<(Keyword, Token<'a>)> {
        let token = self.peek().filter(|token| token.kind == Kind::Word)?;
        keyword(token.text).map(|keyword| (keyword, token))
    }

    fn take(&mut self, kind: &Kind) -> bool {
        let is_next = self.tokens.get(self.next).is_some_and(|token| token.kind == *kind);
        self.next += usize::from(is_next);
        is_next
    }

    fn fail(&self, token: &Token<'_>, reason: impl Into<String>) -> Error {
        fail(self.text, token.start, token.text, reason)
    }

    fn fail_at_end(&self, reason: impl Into<String>) -> Error {
        fail(self.text, self.text.len(), "", reason)
    }
}

impl Keyword {
    fn follows_protocol(self, is_version: bool) -> bool {
        match self {
            Self::End(_) | Self::Side(_) | Self::Address | Self::Port => true,
            Self::What(What::Protocol) => is_version,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same(text: &str, shown: &str) {
        let filter: Filter = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(filter.to_string(), shown, "{text}");
    }

    fn error(text: &str) -> String {
        let error = text.parse::<Filter>().expect_err(text).to_string();
        error.strip_prefix("the filter can't be read at character ").expect(text).to_owned()
    }

    /// tcpdump's words mean what they mean there.
    #[test]
    fn words_of_tcpdump() {
        same("udp and dst port 443", "udp and dst port 443");
        same("not src host 10.0.0.0/8", "not src net 10.0.0.0/8");
        same("tcp port 80 or portrange 8000-8100", "(tcp and port 80) or portrange 8000-8100");
        same("host 10.0.0.1", "host 10.0.0.1");
        same("10.0.0.1", "host 10.0.0.1");
        same("src ::1 and dst net fe80::/10", "src host ::1 and dst net fe80::/10");
        same("src or dst port 53", "port 53");
        same("dst || src port 53", "port 53");
        same("src and dst port 53", "src port 53 and dst port 53");
        same("dst && src 10.0.0.1 or udp", "(src host 10.0.0.1 and dst host 10.0.0.1) or udp");
        same("src 10.0.0.1 or dst 10.0.0.2", "src host 10.0.0.1 or dst host 10.0.0.2");
        same("ip proto 17 or ip6 proto udp", "(ip and udp) or (ip6 and udp)");
        same("proto 200 and tcp", "proto 200 and tcp");
        same("udp dst port 53", "udp and dst port 53");
        same("sctp src or dst portrange 1-2", "sctp and portrange 1-2");
        same("less 100 or greater 1000", "less 100 or greater 1000");
        same("!tcp&&!(udp||icmp6)", "not tcp and not (udp or icmp6)");
        same("((((ip))))", "ip");
        same("not not ! ! not ip", "not ip");
    }

    /// `and` and `or` bind alike, from the left; `not` binds tighter.
    #[test]
    fn precedence() {
        same("udp or tcp and port 53", "(udp or tcp) and port 53");
        same("udp and tcp or port 53", "(udp and tcp) or port 53");
        same("udp or (tcp and port 53)", "udp or (tcp and port 53)");
        same("not udp and tcp", "not udp and tcp");
        same("not (udp and tcp)", "not (udp and tcp)");
        same("not tcp port 80 and ip", "not (tcp and port 80) and ip");
        same("not src and dst port 80", "not (src port 80 and dst port 80)");
    }

    /// A bare value repeats the words before the last one, all of them, but not the `not`.
    #[test]
    fn bare_values() {
        same("port 80 or 443", "port 80 or port 443");
        same("tcp dst port 80 or 443", "(tcp and dst port 80) or (tcp and dst port 443)");
        same("not host ::1 and ::2", "not host ::1 and host ::2");
        same("not host ::1 and not ::2", "not host ::1 and not host ::2");
        same(
            "tcp port (80 or 443 and not (1 or 2))",
            "((tcp and port 80) or (tcp and port 443)) and not ((tcp and port 1) or (tcp and port 2))",
        );
        same("port (80 or 443) or 8080", "port 80 or port 443 or port 8080");
        same("port 80 and (443 or 8080)", "port 80 and (port 443 or port 8080)");
        same("src and dst port 1 or 2", "(src port 1 and dst port 1) or (src port 2 and dst port 2)");
        same("netns pid 1 or 2", "netns pid 1 or netns pid 2");
        same("comm curl or \"tcp\" or tcp", "comm curl or comm tcp or tcp");
        same("dev eth0 or eth1", "dev eth0 or dev eth1");
        // What has no value, and what is in parentheses, isn't repeated.
        assert!(error("port 80 or tcp or 443").starts_with("19: `443` isn't known here"));
        assert!(error("(port 80 or tcp) or 443").starts_with("21: `443` isn't known here"));
        assert!(error("(port 80) or 443").starts_with("14: `443` isn't known here"));
        assert_eq!(error("port (80 or tcp)"), "13: `tcp` is no port: 0 to 65535 are, and ranges such as 8000-8100");
    }

    /// What tcpdump has no words for.
    #[test]
    fn own_words() {
        same("local port 53 or udp remote portrange 1-2", "local port 53 or (udp and remote portrange 1-2)");
        same("ifname eth0 and dev 3 and iif \"3\"", "dev eth0 and dev 3 and iif \"3\"");
        same("netns /run/netns/a or netns 4026531840", "netns /run/netns/a or netns 4026531840");
        same("netns \"a b\" and netns pid 123", "netns \"a b\" and netns pid 123");
        same("pid 1 and tid 0x10", "pid 1 and tid 16");
        same(r#"comm "a\xff\"" or comm """#, r#"comm "a\xff\"" or comm """#);
        same("cgroup /sys/fs/cgroup/a or cgroup a", "cgroup /sys/fs/cgroup/a or cgroup a");
        same("cgroup user\\x2d1.slice", "cgroup \"user\\\\x2d1.slice\"");
        same("mark 1/0xff or mark 0xffffffff", "mark 0x1/0xff or mark 0xffffffff");
        same("len 100-200 or length 5", "len 100-200 or len 5");
        same("net ::ffff:10.0.0.0/104", "net 10.0.0.0/8");
    }

    /// Errors say which word, where, and what may have been meant.
    #[test]
    fn errors() {
        let cases = [
            ("", "1: something to filter by is missing"),
            ("udp and", "8: something to filter by is missing"),
            ("udp and or tcp", "9: something to filter by is missing before `or`"),
            ("()", "2: something to filter by is missing before `)`"),
            ("tpc", "1: `tpc` isn't known here; did you mean `tcp`?"),
            ("é or tpc", "1: `é` isn't known here; `port`, `host`, `dev`, `tcp` and others say what is meant"),
            ("comm é or tcp udp", "15: `and` or `or` is missing before `udp`"),
            ("tcp adn udp", "5: `and` or `or` is missing before `adn`; did you mean `and`?"),
            ("protrange 1", "1: `protrange` isn't known here; did you mean `portrange`?"),
            ("port 80 443", "9: `and` or `or` is missing before `443`"),
            ("(port 80 443)", "10: `and`, `or` or `)` is missing before `443`"),
            ("(tcp", "1: this `(` isn't closed"),
            ("tcp)", "4: this `)` closes nothing"),
            ("port", "5: a port is missing behind `port`"),
            ("port and", "6: a port is missing between `port` and `and`"),
            ("port 65536", "6: `65536` is no port: 0 to 65535 are, and ranges such as 8000-8100"),
            ("port http", "6: `http` is no port: 0 to 65535 are, and ranges such as 8000-8100"),
            ("port 9-5", "6: there are no ports from 9 to 5"),
            (
                "port 80 or tpc",
                "12: `tpc` is no port: 0 to 65535 are, and ranges such as 8000-8100; did you mean `tcp`?",
            ),
            ("dev eth0 or tpc", "13: `tpc` isn't known here; did you mean `tcp`? Or write `dev tpc`"),
            ("local 53", "1: `local` is only for ports: `local port 53`"),
            ("host a", "6: `a` is no address: 10.0.0.1, 10.0.0.0/8, 2001:db8::/32 are"),
            ("net 10.0.0.1/8", "5: `10.0.0.1/8` has bits set behind the prefix; did you mean `10.0.0.0/8`?"),
            (
                "netns blue",
                "7: `blue` is no network namespace: a path such as /run/netns/blue, an inode, or `pid` and a pid are",
            ),
            ("pid -1", "5: `-1` is not a pid: 0 to 4294967295 are"),
            ("mark 0x100/0xff", "6: no mark is 0x100 where only 0xff of it counts; did you mean 0x0/0xff?"),
            ("less 4294967296", "6: `4294967296` is not a length: 0 to 4294967295 are"),
            (
                "comm 1234567890123456",
                "6: `1234567890123456`: the kernel keeps 15 bytes of a thread's name, which are `123456789012345`",
            ),
            ("udp & tcp", "5: a single `&` means nothing; did you mean `&&`?"),
            ("comm \"a", "6: the quotes aren't closed"),
        ];
        for (text, expected) in cases {
            assert_eq!(error(text), expected, "{text:?}");
        }
        let shown = error("a\u{1b}[2J");
        assert!(shown.contains("`a\\u{1b}[2J`"), "{shown}");
        assert!(error(&"x".repeat(4000)).len() < 200);
        let parsed = "dev eth0 or tpc".parse::<Filter>().unwrap_err();
        let ErrorKind::FilterSyntax { position: 13, word, .. } = parsed.kind() else { panic!("{parsed}") };
        assert_eq!(word, "tpc");
    }

    /// Absurd depth is refused, and what isn't deep isn't.
    #[test]
    fn depth() {
        let nested = |depth: usize| format!("{}ip{}", "(".repeat(depth), ")".repeat(depth));
        same(&nested(DEEPEST), "ip");
        assert_eq!(error(&nested(DEEPEST + 1)), "65: more than 64 pairs of parentheses are within each other");
        assert!(error(&"(".repeat(4096)).starts_with("65: "));
        assert!(error(&"!(".repeat(2048)).starts_with("130: "));
        assert!(error(&format!("port {}", "(".repeat(4000))).starts_with("70: "));
        same(&format!("{}ip", "!".repeat(4094)), "ip");
        same(&format!("{}ip", "(ip) and ".repeat(400)), &format!("{}ip", "ip and ".repeat(400)));
    }

    /// Every word that is suggested is known.
    #[test]
    fn keywords() {
        for (name, known) in KEYWORDS {
            assert_eq!(keyword(name), Some(known), "{name} is there twice");
        }
        for (protocol, name) in PROTOCOLS {
            assert_eq!(keyword(name), Some(Keyword::Protocol(protocol)));
        }
    }
}

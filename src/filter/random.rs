//! Random filters, for tests.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::primitive::{At, End, Interface, Netns, Primitive, Side};
use super::value::{Ports, Prefix, Protocol};
use super::{Filter, Part};

/// xorshift64*, so that a failure can be repeated.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(super) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Less than that.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        (self.bits() >> 32) % bound
    }

    pub(super) fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize].clone()
    }

    /// Any number, often a small one.
    fn number(&mut self) -> u32 {
        let width = self.below(33) as u32;
        (self.bits() as u32).checked_shr(32 - width).unwrap_or(0)
    }

    /// Any bytes, often those that mean something in a text.
    fn name(&mut self, most: u64) -> Vec<u8> {
        let len = self.below(most + 1);
        let odd = b"\"\\() !&|/.-\n\x1b\xc3\xa9\xff019";
        let bytes = (0..len).map(|_| if self.below(3) == 0 { self.pick(odd) } else { b'a' + self.below(26) as u8 });
        bytes.filter(|byte| *byte != 0).collect()
    }

    fn word(&mut self) -> Vec<u8> {
        match self.below(4) {
            0 => self.pick(&["and", "or", "not", "pid", "tcp", "port", "7", ""]).into(),
            _ => self.name(15),
        }
    }

    fn text(&mut self) -> String {
        String::from_utf8_lossy(&self.word()).into_owned()
    }

    fn prefix(&mut self) -> Prefix {
        let address: IpAddr = if self.below(2) == 0 {
            Ipv4Addr::from_bits(self.bits() as u32).into()
        } else {
            Ipv6Addr::from_bits(u128::from(self.bits()) << 64 | u128::from(self.bits())).into()
        };
        if self.below(3) == 0 {
            return address.into();
        }
        match address {
            IpAddr::V4(v4) => {
                let bits = self.below(33) as u8;
                let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
                Prefix::new(Ipv4Addr::from_bits(v4.to_bits() & mask), bits).unwrap()
            }
            IpAddr::V6(v6) => {
                let bits = self.below(129) as u8;
                let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
                Prefix::new(Ipv6Addr::from_bits(v6.to_bits() & mask), bits).unwrap()
            }
        }
    }

    fn ports(&mut self) -> Ports {
        let (a, b) = (self.number() as u16, self.number() as u16);
        if self.below(2) == 0 { a.into() } else { (a.min(b)..=a.max(b)).into() }
    }

    fn interface(&mut self) -> Interface {
        let name = self.text();
        let interface = Interface::Name(name);
        let bad = Primitive::Interface(At::Now, interface.clone()).complaint().is_some();
        if bad || self.below(2) == 0 { Interface::Index(self.number().max(1)) } else { interface }
    }

    fn netns(&mut self) -> Netns {
        match self.below(3) {
            0 => Netns::Inode(self.number()),
            1 => Netns::OfPid(self.number()),
            _ => Netns::Path(format!("{}{}", self.pick(&["/run/netns/", "/", "./"]), self.text()).into()),
        }
    }

    fn primitive(&mut self) -> Primitive {
        let end = self.pick(&[End::Source, End::Destination, End::Either]);
        match self.below(13) {
            0 => Primitive::Protocol(Protocol(self.pick(&[1, 6, 17, 47, 58, 132, 200, 0, 255]))),
            1 => self.pick(&[Primitive::Ipv4, Primitive::Ipv6]),
            2 | 3 => Primitive::Address(end, self.prefix()),
            4 => Primitive::Port(end, self.ports()),
            5 => Primitive::SidePort(self.pick(&[Side::Local, Side::Remote]), self.ports()),
            6 => Primitive::Interface(self.pick(&[At::Now, At::Received]), self.interface()),
            7 => Primitive::Netns(self.netns()),
            8 => {
                let number = self.number();
                self.pick(&[Primitive::Pid(number), Primitive::Tid(number)])
            }
            9 => Primitive::Comm(self.word()),
            10 => Primitive::Cgroup(format!("/{}", self.text()).into()),
            11 => {
                let mask = self.pick(&[u32::MAX, 0xff, 0, 0x8000_0001]);
                Primitive::Mark { value: self.number() & mask, mask }
            }
            _ => {
                let (a, b) = (self.number(), self.number());
                match self.below(4) {
                    0 => Primitive::Length { low: a, high: a },
                    1 => Primitive::Length { low: 0, high: a },
                    2 => Primitive::Length { low: a, high: u32::MAX },
                    _ => Primitive::Length { low: a.min(b), high: a.max(b) },
                }
            }
        }
    }

    /// A filter of so many primitives, each made by this.
    pub(super) fn filter(&mut self, primitives: u64, primitive: &mut dyn FnMut(&mut Self) -> Primitive) -> Filter {
        let filter = if primitives <= 1 {
            Filter::is(primitive(self))
        } else {
            let left = 1 + self.below(primitives - 1);
            let (a, b) = (self.filter(left, primitive), self.filter(primitives - left, primitive));
            if self.below(2) == 0 { a & b } else { a | b }
        };
        if self.below(4) == 0 { !filter } else { filter }
    }
}

/// What is written is read as it was.
#[test]
fn texts_are_read_again() {
    for seed in 0..20_000 {
        let mut random = Random::new(seed);
        let primitives = 1 + random.below(12);
        let filter = random.filter(primitives, &mut Random::primitive);
        let text = filter.to_string();
        let read: Filter = text.parse().unwrap_or_else(|error| panic!("seed {seed}: {text}: {error}"));
        assert_eq!(read, filter, "seed {seed}: {text}");
        assert_eq!(read.to_string(), text, "seed {seed}");
        assert!(!text.chars().any(char::is_control), "seed {seed}: {text:?}");
    }
}

/// Texts of random words are read or refused; what is read holds what `Filter` promises of its parts.
#[test]
fn any_text_is_answered() {
    let words = [
        "tcp",
        "ip6",
        "src",
        "dst",
        "or",
        "and",
        "not",
        "!",
        "(",
        ")",
        "port",
        "host",
        "80",
        "10.0.0.1",
        "::/0",
        "1-2",
        "&&",
        "dev",
        "comm",
        "\"x\"",
        "local",
        "netns",
        "pid",
        "/a",
        "mark",
        "0x1/0x1",
        "less",
        "proto",
        "é",
        "\\",
        "\"\\x00\"",
    ];
    let mut accepted = 0;
    for seed in 0..200_000 {
        let mut random = Random::new(seed);
        let text: Vec<_> = (0..1 + random.below(8)).map(|_| random.pick(&words)).collect();
        let text = text.join(" ");
        match text.parse::<Filter>() {
            Ok(filter) => {
                accepted += 1;
                assert!(filter.complaint().is_none(), "{text}");
                check_parts(&filter);
                assert_eq!(filter.to_string().parse::<Filter>().unwrap(), filter, "{text}");
            }
            Err(error) => {
                let crate::ErrorKind::FilterSyntax { position, word, .. } = error.kind() else { panic!("{error:?}") };
                let rest: String = text.chars().skip(position - 1).collect();
                assert!(rest.starts_with(word.as_str()) && (!word.is_empty() || rest.is_empty()), "{text}: {error}");
            }
        }
    }
    assert!(accepted > 1_000, "{accepted}");
}

/// As the comment at [`Filter`]'s parts says.
fn check_parts(filter: &Filter) {
    let operands = filter.operands();
    for (place, part) in filter.parts.iter().enumerate() {
        match part {
            Part::Is(_) => {}
            Part::Not => assert_ne!(filter.parts[operands[place][0]], Part::Not, "{filter}"),
            Part::Join(join, count) => {
                assert!(*count >= 2 && operands[place].len() == *count, "{filter}");
                let same = |operand: &usize| matches!(&filter.parts[*operand], Part::Join(other, _) if other == join);
                assert!(!operands[place].iter().any(same), "{filter}");
            }
        }
    }
    let all: usize = operands.iter().map(Vec::len).sum();
    assert_eq!(all + 1, filter.parts.len(), "{filter}");
}

//! What packets are compared with: [`Protocol`], [`Prefix`], [`Ports`].

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::error::Error;

/// A transport protocol, by its number (`IPPROTO_...`).
///
/// ```
/// use dwell::Protocol;
///
/// assert_eq!("udp".parse::<Protocol>()?, Protocol::UDP);
/// assert_eq!("47".parse::<Protocol>()?, Protocol::GRE);
/// assert_eq!(Protocol(200).to_string(), "200");
/// # Ok::<(), dwell::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Protocol(pub u8);

impl Protocol {
    /// ICMP for IPv4.
    pub const ICMP: Self = Self(1);
    /// IGMP.
    pub const IGMP: Self = Self(2);
    /// TCP.
    pub const TCP: Self = Self(6);
    /// UDP.
    pub const UDP: Self = Self(17);
    /// GRE.
    pub const GRE: Self = Self(47);
    /// IPsec's encapsulated payload.
    pub const ESP: Self = Self(50);
    /// IPsec's authentication header.
    pub const AH: Self = Self(51);
    /// ICMP for IPv6.
    pub const ICMP6: Self = Self(58);
    /// OSPF.
    pub const OSPF: Self = Self(89);
    /// PIM.
    pub const PIM: Self = Self(103);
    /// VRRP.
    pub const VRRP: Self = Self(112);
    /// SCTP.
    pub const SCTP: Self = Self(132);
    /// UDP-Lite.
    pub const UDPLITE: Self = Self(136);

    pub(super) fn named(name: &str) -> Option<Self> {
        PROTOCOLS.iter().find(|(_, known)| *known == name).map(|(protocol, _)| *protocol)
    }

    pub(super) fn name(self) -> Option<&'static str> {
        PROTOCOLS.iter().find(|(protocol, _)| *protocol == self).map(|(_, name)| *name)
    }
}

/// The first name of each is the one that is written.
pub(super) const PROTOCOLS: [(Protocol, &str); 15] = [
    (Protocol::ICMP, "icmp"),
    (Protocol::IGMP, "igmp"),
    (Protocol::TCP, "tcp"),
    (Protocol::UDP, "udp"),
    (Protocol::GRE, "gre"),
    (Protocol::ESP, "esp"),
    (Protocol::AH, "ah"),
    (Protocol::ICMP6, "icmp6"),
    (Protocol::ICMP6, "icmpv6"),
    (Protocol::OSPF, "ospf"),
    (Protocol::PIM, "pim"),
    (Protocol::VRRP, "vrrp"),
    (Protocol::SCTP, "sctp"),
    (Protocol::UDPLITE, "udplite"),
    (Protocol::UDPLITE, "udp-lite"),
];

impl From<u8> for Protocol {
    fn from(number: u8) -> Self {
        Self(number)
    }
}

/// The name, such as `tcp`; the number where this crate has none for it.
impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.pad(name),
            None => f.pad(&self.0.to_string()),
        }
    }
}

/// From a name or a number.
impl FromStr for Protocol {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let number = || number(text).and_then(|number| u8::try_from(number).ok()).map(Self);
        Self::named(text).or_else(number).ok_or_else(|| {
            let names: Vec<_> = PROTOCOLS.iter().map(|(_, name)| *name).collect();
            let reason = format!("`{}` is no protocol: {} are, and 0 to 255", text.escape_debug(), names.join(", "));
            Error::config("protocol", reason)
        })
    }
}

/// Addresses that begin alike: `10.0.0.0/8`, `2001:db8::/32`, or a single one.
///
/// An IPv4 address that is written as an IPv6 one (`::ffff:10.0.0.1`, and prefixes of 96 bits and more below
/// `::ffff:0:0/96`) is taken for the IPv4 address that it stands for. Apart from that a prefix has addresses of one IP
/// version only: `::/0` is every IPv6 address, and no IPv4 address.
///
/// ```
/// use std::net::Ipv4Addr;
/// use dwell::Prefix;
///
/// let private = Prefix::new(Ipv4Addr::new(10, 0, 0, 0), 8)?;
/// assert_eq!(private, "10.0.0.0/8".parse()?);
/// assert_eq!("::ffff:10.0.0.0/104".parse::<Prefix>()?, private);
/// assert_eq!(Prefix::from(Ipv4Addr::LOCALHOST).to_string(), "127.0.0.1");
/// # Ok::<(), dwell::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Prefix {
    address: IpAddr,
    bits: u8,
}

impl Prefix {
    /// The addresses whose first `bits` bits are those of this one.
    ///
    /// # Errors
    ///
    /// If there are more bits than the address has (32 or 128), or the address has a bit set behind them.
    pub fn new(address: impl Into<IpAddr>, bits: u8) -> Result<Self, Error> {
        let address = address.into();
        let most = width(address);
        if bits > most {
            let reason = format!("`{address}/{bits}`: a prefix of this address has 0 to {most} bits");
            return Err(Error::config("prefix", reason));
        }
        let first = masked(address, bits);
        if first != address {
            let reason = format!("`{address}/{bits}` has bits set behind the prefix; did you mean `{first}/{bits}`?");
            return Err(Error::config("prefix", reason));
        }
        Ok(match address {
            // A shorter one has other addresses as well, or begins with 96 bits that aren't all of the marker's.
            IpAddr::V6(v6) if bits >= 96 => match v6.to_ipv4_mapped() {
                Some(v4) => Self { address: v4.into(), bits: bits - 96 },
                None => Self { address, bits },
            },
            _ => Self { address, bits },
        })
    }

    /// The first of its addresses.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// How many bits its addresses have in common.
    pub fn bits(&self) -> u8 {
        self.bits
    }

    /// Whether it is a single address.
    pub fn is_host(&self) -> bool {
        self.bits == width(self.address)
    }

    /// The IP version, its address as the kernel's programs keep it, and which bits of that count.
    pub(super) fn pattern(&self) -> (u32, [u8; 16], [u8; 16]) {
        let mask = if self.bits == 0 { 0 } else { u128::MAX << (128 - u32::from(self.bits)) };
        let mut address = [0; 16];
        match self.address {
            IpAddr::V4(v4) => {
                address[..4].copy_from_slice(&v4.octets());
                (4, address, mask.to_be_bytes())
            }
            IpAddr::V6(v6) => (6, v6.octets(), mask.to_be_bytes()),
        }
    }
}

fn width(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// The address with zeros behind its first bits.
fn masked(address: IpAddr, bits: u8) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
            Ipv4Addr::from_bits(v4.to_bits() & mask).into()
        }
        IpAddr::V6(v6) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
            Ipv6Addr::from_bits(v6.to_bits() & mask).into()
        }
    }
}

/// A single address.
impl From<IpAddr> for Prefix {
    fn from(address: IpAddr) -> Self {
        let address = address.to_canonical();
        Self { address, bits: width(address) }
    }
}

/// A single address.
impl From<Ipv4Addr> for Prefix {
    fn from(address: Ipv4Addr) -> Self {
        IpAddr::from(address).into()
    }
}

/// A single address.
impl From<Ipv6Addr> for Prefix {
    fn from(address: Ipv6Addr) -> Self {
        IpAddr::from(address).into()
    }
}

/// `ADDRESS/BITS`; of a single address without the bits.
impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_host() {
            true => f.pad(&self.address.to_string()),
            false => f.pad(&format!("{}/{}", self.address, self.bits)),
        }
    }
}

/// `ADDRESS` or `ADDRESS/BITS`. Names aren't looked up.
impl FromStr for Prefix {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            let text = text.escape_debug();
            Error::config("prefix", format!("`{text}` is no address: 10.0.0.1, 10.0.0.0/8, 2001:db8::/32 are"))
        };
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        match bits {
            None => Ok(address.into()),
            // More than fits says the same as more than there is.
            Some(bits) => Self::new(address, number(bits).ok_or_else(wrong)?.try_into().unwrap_or(u8::MAX)),
        }
    }
}

/// Ports from one to another, both included; or a single one.
///
/// ```
/// use dwell::Ports;
///
/// assert_eq!(Ports::from(53), Ports::from(53..=53));
/// assert_eq!(Ports::from(8000..=8100).to_string(), "8000-8100");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ports {
    pub(super) low: u16,
    pub(super) high: u16,
}

impl From<u16> for Ports {
    fn from(port: u16) -> Self {
        Self { low: port, high: port }
    }
}

impl From<RangeInclusive<u16>> for Ports {
    fn from(ports: RangeInclusive<u16>) -> Self {
        Self { low: *ports.start(), high: *ports.end() }
    }
}

/// `80` or `8000-8100`.
impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.low == self.high {
            true => f.pad(&self.low.to_string()),
            false => f.pad(&format!("{}-{}", self.low, self.high)),
        }
    }
}

/// A number, decimal or, after `0x`, hexadecimal. Nothing else that Rust takes for one, such as `+1`.
pub(super) fn number(text: &str) -> Option<u64> {
    let (digits, radix) = match text.strip_prefix("0x") {
        Some(digits) => (digits, 16),
        None => (text, 10),
    };
    let all_digits = digits.chars().all(|digit| digit.is_digit(radix));
    all_digits.then(|| u64::from_str_radix(digits, radix).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Protocols are read as they are written, by name or number.
    #[test]
    fn protocols() {
        for number in 0..=255 {
            let protocol = Protocol(number);
            assert_eq!(protocol.to_string().parse::<Protocol>().unwrap(), protocol);
            assert_eq!(number.to_string().parse::<Protocol>().unwrap(), protocol);
        }
        assert_eq!("icmpv6".parse::<Protocol>().unwrap().to_string(), "icmp6");
        for text in ["", "256", "-1", "+6", "TCP", "tcp "] {
            assert!(text.parse::<Protocol>().is_err(), "{text:?}");
        }
    }

    /// A prefix has no bits behind it, and not more than its address.
    #[test]
    fn prefixes() {
        for text in ["0.0.0.0/0", "10.0.0.0/8", "10.0.0.1", "255.255.255.255", "::/0", "2001:db8::/32", "::1"] {
            assert_eq!(text.parse::<Prefix>().unwrap().to_string(), text);
        }
        assert_eq!("10.0.0.1/32".parse::<Prefix>().unwrap(), Ipv4Addr::new(10, 0, 0, 1).into());
        assert_eq!("::1/128".parse::<Prefix>().unwrap(), Ipv6Addr::LOCALHOST.into());
        let error = |text: &str| text.parse::<Prefix>().unwrap_err().to_string();
        assert_eq!(error("10.1.0.0/8"), "`10.1.0.0/8` has bits set behind the prefix; did you mean `10.0.0.0/8`?");
        assert_eq!(error("1::/0"), "`1::/0` has bits set behind the prefix; did you mean `::/0`?");
        assert_eq!(error("10.0.0.0/33"), "`10.0.0.0/33`: a prefix of this address has 0 to 32 bits");
        assert_eq!(error("::/129"), "`::/129`: a prefix of this address has 0 to 128 bits");
        assert!(error("10.0.0.0/999999").ends_with("0 to 32 bits"));
        for text in ["", "10", "10.0.0", "10.0.0.0/", "10.0.0.0/+8", "10.0.0.0/8/8", "/8", "localhost", "::1%lo"] {
            assert!(error(text).contains("is no address"), "{text:?}");
        }
    }

    /// What stands for IPv4 addresses is one of them; what has others as well isn't.
    #[test]
    fn mapped_addresses() {
        let same = [
            ("::ffff:1.2.3.4", "1.2.3.4"),
            ("::ffff:1.2.3.4/128", "1.2.3.4"),
            ("::ffff:1.2.0.0/112", "1.2.0.0/16"),
            ("::ffff:0:0/96", "0.0.0.0/0"),
            ("::fffe:0:0/95", "::fffe:0:0/95"),
            ("::1.2.3.4", "::102:304"),
            ("::/96", "::/96"),
        ];
        for (text, shown) in same {
            assert_eq!(text.parse::<Prefix>().unwrap().to_string(), shown);
        }
        let mapped: Ipv6Addr = "::ffff:1.2.3.4".parse().unwrap();
        assert_eq!(Prefix::from(mapped), Ipv4Addr::new(1, 2, 3, 4).into());
    }

    /// The kernel's form: IPv4 in the first four bytes, nothing behind the prefix.
    #[test]
    fn patterns() {
        let pattern = |text: &str| text.parse::<Prefix>().unwrap().pattern();
        let (version, address, mask) = pattern("10.128.0.0/9");
        assert_eq!((version, &address[..4], &mask[..4]), (4, &[10, 128, 0, 0][..], &[255, 128, 0, 0][..]));
        assert_eq!((&address[4..], &mask[4..]), (&[0; 12][..], &[0; 12][..]));
        assert_eq!(pattern("::1"), (6, Ipv6Addr::LOCALHOST.octets(), [255; 16]));
        assert_eq!(pattern("::/0"), (6, [0; 16], [0; 16]));
        assert_eq!(pattern("0.0.0.0/0"), (4, [0; 16], [0; 16]));
    }

    /// Decimal or hexadecimal, and nothing else.
    #[test]
    fn numbers() {
        assert_eq!((number("0"), number("10"), number("0x1F")), (Some(0), Some(10), Some(31)));
        assert_eq!(number("18446744073709551615"), Some(u64::MAX));
        for text in ["", "0x", "+1", "-1", "1 ", "0b1", "1_000", "18446744073709551616", "٣"] {
            assert_eq!(number(text), None, "{text:?}");
        }
    }
}

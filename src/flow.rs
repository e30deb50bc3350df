//! The flow of a packet or a socket.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Protocol, addresses and ports.
///
/// ```
/// use dwell::{EventKey, LatencyEvent};
///
/// fn is_dns(event: &LatencyEvent) -> bool {
///     matches!(&event.key, EventKey::Flow(flow) if flow.protocol == 17 && flow.destination().port() == 53)
/// }
/// # let _ = is_dns;
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Flow {
    /// The protocol's number (`IPPROTO_...`): 6 is TCP, 17 is UDP.
    pub protocol: u8,
    version: Version,
    source: Endpoint,
    destination: Endpoint,
}

/// Of the internet protocol; both ends have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Version {
    V4,
    V6,
}

/// As in a packet, which takes 18 bytes where a [`SocketAddr`] takes 32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Endpoint {
    /// An IPv4 address takes the first four, and the rest is 0.
    address: [u8; 16],
    port: u16,
}

impl Flow {
    /// From addresses as in packets, of which IPv4 only uses the first four bytes, and ports in the machine's byte order;
    /// `None` for a version of IP that is neither 4 nor 6.
    pub(crate) fn new(
        version: u8,
        protocol: u8,
        source: ([u8; 16], u16),
        destination: ([u8; 16], u16),
    ) -> Option<Self> {
        let version = match version {
            4 => Version::V4,
            6 => Version::V6,
            _ => return None,
        };
        let end = |(mut address, port): ([u8; 16], u16)| {
            if version == Version::V4 {
                address[4..].fill(0);
            }
            Endpoint { address, port }
        };
        Some(Self { protocol, version, source: end(source), destination: end(destination) })
    }

    /// The sender. The port is 0 where the protocol has none.
    pub fn source(&self) -> SocketAddr {
        self.socket_address(&self.source)
    }

    /// The receiver. The port is 0 where the protocol has none.
    pub fn destination(&self) -> SocketAddr {
        self.socket_address(&self.destination)
    }

    fn socket_address(&self, end: &Endpoint) -> SocketAddr {
        let ip = match (self.version, end.address) {
            (Version::V4, [a, b, c, d, ..]) => IpAddr::from(Ipv4Addr::new(a, b, c, d)),
            (Version::V6, address) => IpAddr::from(Ipv6Addr::from(address)),
        };
        SocketAddr::new(ip, end.port)
    }
}

/// By its name, where it has one: `udp`.
pub(crate) fn write_protocol(f: &mut fmt::Formatter<'_>, protocol: u8) -> fmt::Result {
    match protocol {
        1 => write!(f, "icmp"),
        6 => write!(f, "tcp"),
        17 => write!(f, "udp"),
        58 => write!(f, "icmpv6"),
        number => write!(f, "protocol {number}"),
    }
}

/// `udp 10.0.0.1:53 > 10.0.0.2:4711`; without ports where there are none.
impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_protocol(f, self.protocol)?;
        let (source, destination) = (self.source(), self.destination());
        if source.port() == 0 && destination.port() == 0 {
            return write!(f, " {} > {}", source.ip(), destination.ip());
        }
        write!(f, " {source} > {destination}")
    }
}

impl fmt::Debug for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flow")
            .field("protocol", &self.protocol)
            .field("source", &self.source())
            .field("destination", &self.destination())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(version: u8, protocol: u8, port: u16) -> Flow {
        let mut address = [0; 16];
        address[..4].copy_from_slice(&[10, 0, 0, 1]);
        Flow::new(version, protocol, (address, port), ([1; 16], port)).unwrap()
    }

    /// Protocols by name where they have one, ports where there are any.
    #[test]
    fn reads_well() {
        assert_eq!(flow(4, 17, 53).to_string(), "udp 10.0.0.1:53 > 1.1.1.1:53");
        assert_eq!(flow(6, 6, 53).to_string(), "tcp [a00:1::]:53 > [101:101:101:101:101:101:101:101]:53");
        assert_eq!(flow(4, 1, 0).to_string(), "icmp 10.0.0.1 > 1.1.1.1");
        assert_eq!(flow(4, 89, 0).to_string(), "protocol 89 10.0.0.1 > 1.1.1.1");
    }

    /// What follows an IPv4 address doesn't count, and there are two versions.
    #[test]
    fn versions() {
        let mut padded = [0; 16];
        padded[..4].fill(1);
        assert_eq!(flow(4, 6, 1).destination, Endpoint { address: padded, port: 1 });
        assert_ne!(flow(6, 6, 1), flow(4, 6, 1));
        assert_eq!(Flow::new(5, 6, ([0; 16], 0), ([0; 16], 0)), None);
    }

    /// Small, since every event has room for one.
    #[test]
    fn size() {
        assert_eq!(size_of::<Flow>(), 38);
    }
}

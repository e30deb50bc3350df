//! Whose packet it was: [`Identity`].

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::flow::write_protocol;
use crate::wire::{RawIdentity, direction, known};

/// Whose packet a span was about, as the kernel knew it at the start: each part is `None` where that can't be told, never
/// invented.
///
/// Read from the packet's headers where it has them; before they are written, on the way out, and where a function has no
/// packet but a socket (`tcp_sendmsg`), from the socket. IPv4 addresses within IPv6 (`::ffff:10.0.0.1`) are shown as IPv4,
/// which they are on the wire. Where a packet is carried within another, the outer one counts, unless
/// [`inner_headers`](crate::LatencyProbeBuilder::inner_headers) says otherwise.
///
/// In events once [`identify`](crate::LatencyProbeBuilder::identify) asks for it. Headers take
/// `bpf_probe_read_kernel()`, which the lockdown mode `confidentiality` forbids; the rest doesn't, but for the cgroup.
///
/// ```
/// use dwell::LatencyEvent;
///
/// fn is_https(event: &LatencyEvent) -> bool {
///     event.identity.is_some_and(|identity| identity.protocol() == Some(6) && identity.destination_port() == Some(443))
/// }
/// # let _ = is_https;
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity(RawIdentity);

impl Identity {
    pub(crate) fn new(raw: &RawIdentity) -> Self {
        Self(*raw)
    }

    fn if_known<T>(&self, what: u32, value: T) -> Option<T> {
        (self.0.known & what == what).then_some(value)
    }

    /// 4 or 6; `None` also for what isn't IP.
    pub fn ip_version(&self) -> Option<u8> {
        self.if_known(known::VERSION, self.0.flow.version)
    }

    /// The transport protocol's number (`IPPROTO_...`): 6 is TCP, 17 is UDP. Of IPv6, what follows the extension headers.
    pub fn protocol(&self) -> Option<u8> {
        self.if_known(known::PROTOCOL, self.0.flow.protocol)
    }

    /// The sender's address.
    pub fn source(&self) -> Option<IpAddr> {
        self.address(self.0.flow.saddr)
    }

    /// The receiver's address.
    pub fn destination(&self) -> Option<IpAddr> {
        self.address(self.0.flow.daddr)
    }

    fn address(&self, bytes: [u8; 16]) -> Option<IpAddr> {
        let [a, b, c, d, ..] = bytes;
        match self.if_known(known::ADDRESSES | known::VERSION, self.0.flow.version)? {
            4 => Some(Ipv4Addr::new(a, b, c, d).into()),
            6 => Some(Ipv6Addr::from(bytes).into()),
            _ => None,
        }
    }

    /// The sender's port; `None` also where the protocol has none, and of a fragment but the first.
    pub fn source_port(&self) -> Option<u16> {
        self.if_known(known::SPORT, u16::from_be_bytes(self.0.flow.sport))
    }

    /// The receiver's port; `None` also where the protocol has none, and of a fragment but the first.
    pub fn destination_port(&self) -> Option<u16> {
        self.if_known(known::DPORT, u16::from_be_bytes(self.0.flow.dport))
    }

    /// The port on this machine: that of the packet's socket; of a packet that was received and has none yet, the
    /// receiver's, once the kernel has noted the interface ([`received_on`](Self::received_on)).
    pub fn local_port(&self) -> Option<u16> {
        match self.0.direction {
            direction::OUTGOING => self.source_port(),
            direction::INCOMING => self.destination_port(),
            _ => None,
        }
    }

    /// The other one.
    pub fn remote_port(&self) -> Option<u16> {
        match self.0.direction {
            direction::OUTGOING => self.destination_port(),
            direction::INCOMING => self.source_port(),
            _ => None,
        }
    }

    /// The differentiated services code point of the IP header, 0 to 63. Not from sockets.
    pub fn dscp(&self) -> Option<u8> {
        self.if_known(known::HEADER, self.0.tos >> 2)
    }

    /// The time to live, or hop limit, of the IP header. Not from sockets.
    pub fn ttl(&self) -> Option<u8> {
        self.if_known(known::HEADER, self.0.ttl)
    }

    /// The id of the outermost VLAN tag, whether it is within the packet or was taken off by the network device.
    pub fn vlan(&self) -> Option<u16> {
        self.if_known(known::VLAN, self.0.vlan)
    }

    /// The packet's length in bytes (`skb->len`): what it counts, depends on where it is, and a packet put together by GRO,
    /// or not yet taken apart by GSO, is as long as all of its parts.
    pub fn len(&self) -> Option<u32> {
        self.if_known(known::PACKET, self.0.len)
    }

    /// Whether it is known that the packet has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == Some(0)
    }

    /// The flags of the TCP header: FIN 1, SYN 2, RST 4, PSH 8, ACK 16, URG 32, ECE 64, CWR 128.
    pub fn tcp_flags(&self) -> Option<u8> {
        self.if_known(known::TCP, self.0.tcp_flags)
    }

    /// The sequence number of the TCP header.
    pub fn tcp_sequence(&self) -> Option<u32> {
        self.if_known(known::TCP, self.0.seq)
    }

    /// The index of the network interface that the packet is at: that it came in by, or goes out by.
    pub fn interface(&self) -> Option<u32> {
        self.if_known(known::INTERFACE, self.0.interface)
    }

    /// The index of the interface on which the packet was received (`skb->skb_iif`).
    pub fn received_on(&self) -> Option<u32> {
        self.if_known(known::RECEIVED, self.0.received_on)
    }

    /// The network namespace, by the inode of its file (as `ls -L -i /run/netns/NAME`, or `lsns -t net`, has it): the
    /// interface's where the packet is at one, else the socket's.
    pub fn netns(&self) -> Option<u32> {
        self.if_known(known::NETNS, self.0.netns)
    }

    /// The packet's mark, or the socket's where there is no packet.
    pub fn mark(&self) -> Option<u32> {
        self.if_known(known::MARK, self.0.mark)
    }

    /// The hash of its flow, if it has been computed. 0 counts as not.
    pub fn hash(&self) -> Option<u32> {
        self.if_known(known::PACKET, self.0.hash).filter(|hash| *hash != 0)
    }

    /// The queue of the interface: that the packet came in by, while it is at the interface that received it and if the
    /// driver says so; that it goes out by, if one has been chosen, but for the first, which can't be told from none.
    pub fn queue(&self) -> Option<u16> {
        let queue = self.if_known(known::QUEUE, self.0.queue).filter(|queue| *queue != 0)?;
        match (self.received_on(), self.0.direction) {
            // One more than the queue (skb_record_rx_queue()).
            (Some(index), _) if self.interface() == Some(index) => Some(queue - 1),
            (None, direction::OUTGOING) => Some(queue),
            _ => None,
        }
    }

    /// The id of the socket's cgroup, as long as the packet is in the socket's network namespace; of a function that has neither packet nor socket, of the running task's. It is the
    /// inode of its directory.
    pub fn cgroup(&self) -> Option<u64> {
        self.if_known(known::CGROUP, self.0.cgroup)
    }

    /// The socket's cookie (`SO_COOKIE`), if it has got one.
    pub fn socket_cookie(&self) -> Option<u64> {
        self.if_known(known::COOKIE, self.0.cookie)
    }
}

/// What is known of protocol, addresses and ports, and then of the rest: `tcp 10.0.0.1:40000 > 10.0.0.2:443 netns
/// 4026531840 if 2`.
impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.protocol() {
            Some(protocol) => write_protocol(f, protocol)?,
            None if self.0.known & known::NOT_IP != 0 => f.write_str("not ip")?,
            None => f.write_str("unparsed")?,
        }
        let end = |address: Option<IpAddr>, port: Option<u16>| match (address, port) {
            (Some(ip), Some(port)) => SocketAddr::new(ip, port).to_string(),
            (Some(ip), None) => ip.to_string(),
            (None, Some(port)) => format!("?:{port}"),
            (None, None) => "?".to_owned(),
        };
        if self.protocol().is_some() {
            let source = end(self.source(), self.source_port());
            write!(f, " {source} > {}", end(self.destination(), self.destination_port()))?;
        }
        if let Some(vlan) = self.vlan() {
            write!(f, " vlan {vlan}")?;
        }
        if let Some(netns) = self.netns() {
            write!(f, " netns {netns}")?;
        }
        if let Some(index) = self.interface() {
            write!(f, " if {index}")?;
        }
        Ok(())
    }
}

/// What is known, by name.
impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all = f.debug_struct("Identity");
        let mut field = |name, value: Option<&dyn fmt::Debug>| {
            if let Some(value) = value {
                all.field(name, value);
            }
        };
        macro_rules! fields {
            ($($name:ident),+) => { $(field(stringify!($name), self.$name().as_ref().map(|value| value as &dyn fmt::Debug));)+ };
        }
        fields!(ip_version, protocol, source, destination, source_port, destination_port, local_port, remote_port);
        fields!(dscp, ttl, vlan, len, tcp_flags, tcp_sequence, interface, received_on, netns, mark, hash, queue);
        fields!(cgroup, socket_cookie);
        all.finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::wire::RawFlow;

    /// A packet of which all is known.
    pub(crate) fn raw() -> RawIdentity {
        let mut flow =
            RawFlow { sport: [0x9c, 0x40], dport: [0x01, 0xbb], version: 4, protocol: 6, ..Default::default() };
        flow.saddr[..4].copy_from_slice(&[10, 0, 0, 1]);
        flow.daddr[..4].copy_from_slice(&[10, 0, 0, 2]);
        RawIdentity {
            flow,
            cgroup: 77,
            cookie: 5,
            known: (1 << 16) - 1,
            len: 60,
            seq: 1_000_000,
            mark: 0,
            hash: 9,
            netns: 4_026_531_840,
            interface: 2,
            received_on: 3,
            vlan: 100,
            queue: 4,
            tos: 0xb8,
            ttl: 64,
            tcp_flags: 2,
            direction: direction::OUTGOING,
        }
    }

    /// Each part is itself, ports in the right order of bytes.
    #[test]
    fn known() {
        let all = Identity::new(&raw());
        assert_eq!(all.source(), Some("10.0.0.1".parse().unwrap()));
        assert_eq!((all.source_port(), all.destination_port()), (Some(40_000), Some(443)));
        assert_eq!((all.local_port(), all.remote_port()), (Some(40_000), Some(443)));
        assert_eq!((all.dscp(), all.ttl(), all.vlan(), all.mark()), (Some(46), Some(64), Some(100), Some(0)));
        assert_eq!(all.queue(), None);
        let at_home = Identity::new(&RawIdentity { interface: 3, ..raw() });
        assert_eq!(at_home.queue(), Some(3));
        let sent = Identity::new(&RawIdentity { known: raw().known & !known::RECEIVED, ..raw() });
        assert_eq!((sent.queue(), sent.received_on()), (Some(4), None));
        assert_eq!(all.to_string(), "tcp 10.0.0.1:40000 > 10.0.0.2:443 vlan 100 netns 4026531840 if 2");
        let incoming = Identity::new(&RawIdentity { direction: direction::INCOMING, queue: 0, hash: 0, ..raw() });
        assert_eq!((incoming.local_port(), incoming.queue(), incoming.hash()), (Some(443), None, None));
    }

    /// Nothing is invented: what isn't known isn't there, whatever lies in its place.
    #[test]
    fn unknown() {
        let none = Identity::new(&RawIdentity { known: 0, ..raw() });
        assert_eq!(format!("{none:?}"), "Identity { .. }");
        assert_eq!(none.to_string(), "unparsed");
        let other = Identity::new(&RawIdentity { known: known::NOT_IP, ..raw() });
        assert_eq!(other.to_string(), "not ip");
        let unconnected = Identity::new(&RawIdentity { known: known::PROTOCOL | known::SPORT, ..raw() });
        assert_eq!(unconnected.to_string(), "tcp ?:40000 > ?");
        assert_eq!((unconnected.local_port(), unconnected.remote_port()), (Some(40_000), None));
    }
}

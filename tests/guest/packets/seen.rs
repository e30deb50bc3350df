//! How often hooks see the packets of each kind.

use super::SEGMENTS;

/// Functions, at their entry, and tracepoints.
pub const HOOKS: [&str; 20] = [
    "udp_sendmsg",
    "udpv6_sendmsg",
    "__tcp_transmit_skb",
    "__ip_local_out",
    "ip6_local_out",
    "__dev_queue_xmit",
    "tp:net_dev_queue",
    "dev_hard_start_xmit",
    "tp:net_dev_start_xmit",
    "tp:netif_rx",
    "tp:netif_receive_skb",
    "ip_rcv",
    "ip_rcv_core",
    "ipv6_rcv",
    "ip6_rcv_core",
    "udp_rcv",
    "udpv6_rcv",
    "tcp_v4_rcv",
    "tcp_v6_rcv",
    "udp_queue_rcv_one_skb",
];

/// How often each of these sees a unit of a kind, on both hosts together: TCP's acknowledgements and answers are among
/// them. What has a tag or is in a tunnel passes several devices on its way out, and a tunnel's packet is received twice,
/// the second time in a list, past `ip_rcv`. A device of veth passes both `tp:net_dev_start_xmit` and `tp:netif_rx`.
///
/// The order is that of [`HOOKS`], in groups: sockets and IP, devices, received by IP, received by protocols.
#[rustfmt::skip]
const SEEN: &[(&str, [usize; HOOKS.len()])] = &[
    ("udp4",                   [1, 0, 0, 1, 0,  1, 1, 1, 1, 1, 1,  1, 1, 0, 0,  1, 0, 0, 0, 1]),
    ("udp6",                   [0, 1, 0, 0, 1,  1, 1, 1, 1, 1, 1,  0, 0, 1, 1,  0, 1, 0, 0, 0]),
    ("udp4-unconnected",       [1, 0, 0, 1, 0,  1, 1, 1, 1, 1, 1,  1, 1, 0, 0,  1, 0, 0, 0, 1]),
    ("udp6-unconnected",       [0, 1, 0, 0, 1,  1, 1, 1, 1, 1, 1,  0, 0, 1, 1,  0, 1, 0, 0, 0]),
    ("udp4-mapped",            [1, 1, 0, 1, 0,  1, 1, 1, 1, 1, 1,  1, 1, 0, 0,  1, 0, 0, 0, 1]),
    ("udp4-mapped-loopback",   [1, 1, 0, 1, 0,  1, 1, 1, 1, 1, 1,  1, 1, 0, 0,  1, 0, 0, 0, 1]),
    ("tcp4",                   [0, 0, 2, 2, 0,  2, 2, 2, 2, 2, 2,  2, 2, 0, 0,  0, 0, 2, 0, 0]),
    ("tcp6",                   [0, 0, 2, 0, 0,  2, 2, 2, 2, 2, 2,  0, 0, 2, 2,  0, 0, 0, 2, 0]),
    ("connect-443",            [0, 0, 3, 4, 0,  4, 4, 4, 4, 4, 4,  4, 4, 0, 0,  0, 0, 4, 0, 0]),
    ("connect-47873",          [0, 0, 3, 4, 0,  4, 4, 4, 4, 4, 4,  4, 4, 0, 0,  0, 0, 4, 0, 0]),
    ("icmp4",                  [0, 0, 0, 2, 0,  2, 2, 2, 2, 2, 2,  2, 2, 0, 0,  0, 0, 0, 0, 0]),
    ("icmp6",                  [0, 0, 0, 0, 2,  2, 2, 2, 2, 2, 2,  0, 0, 2, 2,  0, 0, 0, 0, 0]),
    ("vlan-offloaded",         [1, 0, 0, 1, 0,  2, 2, 2, 2, 1, 1,  1, 1, 0, 0,  1, 0, 0, 0, 1]),
    ("vlan-inserted",          [1, 0, 0, 1, 0,  2, 2, 2, 2, 1, 1,  1, 1, 0, 0,  1, 0, 0, 0, 1]),
    ("vlan-in-band",           [0, 0, 0, 0, 0,  1, 1, 1, 1, 1, 1,  1, 1, 0, 0,  1, 0, 0, 0, 1]),
    ("qinq-offloaded",         [1, 0, 0, 1, 0,  3, 3, 3, 3, 1, 1,  1, 1, 0, 0,  1, 0, 0, 0, 1]),
    ("qinq-in-band",           [0, 0, 0, 0, 0,  1, 1, 1, 1, 1, 1,  1, 1, 0, 0,  1, 0, 0, 0, 1]),
    ("udp6-hop-by-hop",        [0, 0, 0, 0, 0,  1, 1, 1, 1, 1, 1,  0, 0, 1, 1,  0, 1, 0, 0, 0]),
    ("udp6-hop-by-hop-socket", [0, 1, 0, 0, 1,  1, 1, 1, 1, 1, 1,  0, 0, 1, 1,  0, 1, 0, 0, 0]),
    ("udp6-destination",       [0, 0, 0, 0, 0,  1, 1, 1, 1, 1, 1,  0, 0, 1, 1,  0, 1, 0, 0, 0]),
    ("udp6-routing",           [0, 0, 0, 0, 0,  1, 1, 1, 1, 1, 1,  0, 0, 1, 1,  0, 1, 0, 0, 0]),
    ("udp6-atomic-fragment",   [0, 0, 0, 0, 0,  1, 1, 1, 1, 1, 1,  0, 0, 1, 1,  0, 1, 0, 0, 0]),
    ("udp6-all-headers",       [0, 0, 0, 0, 0,  1, 1, 1, 1, 1, 1,  0, 0, 1, 1,  0, 1, 0, 0, 0]),
    ("fragments4",             [1, 0, 0, 1, 0,  3, 3, 3, 3, 3, 3,  3, 3, 0, 0,  1, 0, 0, 0, 1]),
    ("fragments4-other",       [1, 0, 0, 1, 0,  3, 3, 3, 3, 3, 3,  3, 3, 0, 0,  1, 0, 0, 0, 1]),
    ("fragments6",             [0, 1, 0, 0, 1,  3, 3, 3, 3, 3, 3,  0, 0, 3, 3,  0, 1, 0, 0, 0]),
    ("fragments6-other",       [0, 1, 0, 0, 1,  3, 3, 3, 3, 3, 3,  0, 0, 3, 3,  0, 1, 0, 0, 0]),
    ("tcp4-gso",               [0, 0, 2, 2, 0,  2, 2, 2, 2, 2, 2,  2, 2, 0, 0,  0, 0, 2, 0, 0]),
    ("udp4-gso",               [1, 0, 0, 1, 0,  1, 1, 1, 1, 1, 1,  1, 1, 0, 0,  1, 0, 0, 0, 5]),
    ("vxlan",                  [1, 0, 0, 2, 0,  2, 2, 2, 2, 1, 2,  1, 2, 0, 0,  2, 0, 0, 0, 2]),
    ("ipip",                   [1, 0, 0, 2, 0,  2, 2, 2, 2, 1, 2,  1, 2, 0, 0,  1, 0, 0, 0, 1]),
    ("tcp4-sendfile",          [0, 0, 2, 2, 0,  2, 2, 2, 2, 2, 2,  2, 2, 0, 0,  0, 0, 2, 0, 0]),
    ("udp4-zerocopy",          [1, 0, 0, 1, 0,  1, 1, 1, 1, 1, 1,  1, 1, 0, 0,  1, 0, 0, 0, 1]),
    ("udp4-twins",             [2, 0, 0, 2, 0,  2, 2, 2, 2, 2, 2,  2, 2, 0, 0,  2, 0, 0, 0, 2]),
];

/// What [`HOOKS`] see of a unit of a kind, on this kernel.
#[track_caller]
pub fn seen(kind: &str) -> [usize; HOOKS.len()] {
    let (_, mut seen) = *SEEN.iter().find(|(name, _)| *name == kind).unwrap_or_else(|| panic!("no kind {kind}"));
    if kind == "udp4-gso" && !super::sends_super_datagrams() {
        let first = HOOKS.iter().position(|hook| *hook == "tp:net_dev_start_xmit").expect("it is among them");
        // From where they are cut on, all hooks that see any see as many as there are.
        seen[first..].iter_mut().filter(|count| **count == 1).for_each(|count| *count = SEGMENTS);
    }
    seen
}

/// Functions on the way down, at which the headers may not be there yet, and which argument is looked at: sockets in the
/// first two, packets in the others.
pub const EARLY: [(&str, usize); 6] = [
    ("udp_sendmsg", 0),
    ("udpv6_sendmsg", 0),
    ("ip_send_skb", 1),
    ("__tcp_transmit_skb", 1),
    ("__ip_queue_xmit", 1),
    ("__ip_local_out", 2),
];

/// How often a unit's packets and sockets have a flow there, of the times that [`HOOKS`] are passed: not where a socket
/// isn't connected, nor where TCP hands down a packet that is data only.
pub const FLOWS: [(&str, [usize; EARLY.len()]); 8] = [
    ("udp4", [1, 0, 1, 0, 0, 1]),
    ("udp6", [0, 1, 0, 0, 0, 0]),
    ("udp4-unconnected", [0, 0, 1, 0, 0, 1]),
    ("udp6-unconnected", [0, 0, 0, 0, 0, 0]),
    ("udp4-mapped", [0, 0, 1, 0, 0, 1]),
    ("tcp4", [0, 0, 0, 0, 0, 2]),
    ("tcp6", [0, 0, 0, 0, 0, 0]),
    ("fragments4", [1, 0, 1, 0, 0, 1]),
];

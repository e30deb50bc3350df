//! Frames by hand, and what frames are.

use std::net::{IpAddr, Ipv4Addr};

use super::{CLIENT_PORT, PORT, SERVICE_VLAN, SOURCE_PORT, VLAN};
use crate::lab::{Ip, Side};
use crate::raw::Frame;

pub const CTAG: u16 = 0x8100;
pub const STAG: u16 = 0x88a8;
pub const IPV4: u16 = 0x0800;
pub const IPV6: u16 = 0x86dd;
pub const ICMP: u8 = 1;
pub const IPIP: u8 = 4;
pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const ICMP6: u8 = 58;
pub const HOP_BY_HOP: u8 = 0;
pub const ROUTING: u8 = 43;
pub const FRAGMENT: u8 = 44;
pub const DESTINATION: u8 = 60;

pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const ACK: u8 = 16;

/// What datagrams carry, if nothing is said.
pub const PAYLOAD: &[u8] = b"crafted!";

/// A frame from the left to the right: its tags, and the IP packet.
pub fn frame(tags: &[(u16, u16)], ip: u16, packet: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x02, 0x77, 0, 0, 0, 2, 0x02, 0x77, 0, 0, 0, 1];
    for (kind, tci) in tags {
        frame.extend([kind.to_be_bytes(), tci.to_be_bytes()].concat());
    }
    frame.extend(ip.to_be_bytes());
    frame.extend(packet);
    frame
}

/// A datagram to [`PORT`], with the checksum over it and these addresses.
pub fn datagram(addresses: &[u8]) -> Vec<u8> {
    let len = 8 + PAYLOAD.len() as u16;
    let mut datagram = [SOURCE_PORT, PORT, len, 0].map(u16::to_be_bytes).concat();
    datagram.extend(PAYLOAD);
    let pseudo = [addresses, &u16::from(UDP).to_be_bytes(), &len.to_be_bytes()].concat();
    let sum = checksum(&[&pseudo[..], &datagram].concat());
    datagram[6..8].copy_from_slice(&sum);
    datagram
}

pub fn checksum(bytes: &[u8]) -> [u8; 2] {
    let mut sum: u32 = bytes.chunks_exact(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

pub fn packet_v4(from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
    let addresses = [from.octets(), to.octets()].concat();
    let datagram = datagram(&addresses);
    let len = (20 + datagram.len() as u16).to_be_bytes();
    let mut header = vec![0x45, 0, len[0], len[1], 0, 0, 0, 0, 64, UDP, 0, 0];
    header.extend(&addresses);
    let sum = checksum(&header);
    header[10..12].copy_from_slice(&sum);
    [header, datagram].concat()
}

/// With these headers before the datagram's, of eight bytes each.
pub fn packet_v6(headers: &[u8]) -> Vec<u8> {
    let addresses = [Side::Left, Side::Right].map(|side| match side.address(Ip::V6) {
        IpAddr::V6(address) => address.octets(),
        IpAddr::V4(_) => unreachable!("it was asked for"),
    });
    let datagram = datagram(&addresses.concat());
    let len = ((8 * headers.len() + datagram.len()) as u16).to_be_bytes();
    let next = |n: usize| headers.get(n).copied().unwrap_or(UDP);
    let mut packet = vec![0x60, 0, 0, 0, len[0], len[1], next(0), 64];
    packet.extend(addresses.concat());
    for (n, header) in headers.iter().enumerate() {
        packet.push(next(n + 1));
        packet.extend(match *header {
            // Padding.
            HOP_BY_HOP | DESTINATION => [0, 1, 4, 0, 0, 0, 0],
            // Of a type that nobody knows, with no segment left, which is passed over.
            ROUTING => [0, 253, 0, 0, 0, 0, 0],
            // The first and the last at once.
            FRAGMENT => [0, 0, 0, 0, 0, 0, 9],
            _ => unreachable!("no other is asked for"),
        });
    }
    [packet, datagram].concat()
}

// ---- what frames are

/// What is behind the Ethernet header, if it says so.
pub fn of_type(frame: &Frame, kind: u16) -> Option<&[u8]> {
    (frame.bytes.get(12..14)? == kind.to_be_bytes()).then(|| &frame.bytes[14..])
}

/// What is behind a VLAN's tag in the bytes.
pub fn behind_tag(frame: &Frame, kind: u16, tci: u16) -> Option<Frame> {
    let rest = of_type(frame, kind)?;
    (rest.get(..2)? == tci.to_be_bytes()).then(|| Frame { tag: None, bytes: [&frame.bytes[..12], &rest[2..]].concat() })
}

/// What an IPv4 packet without options says of fragments, and what is behind its header.
pub fn in_v4(packet: &[u8], protocol: u8) -> Option<(u16, &[u8])> {
    let header = packet.get(..20)?;
    // Whether it may be cut doesn't matter.
    let cut = u16::from_be_bytes([header[6], header[7]]) & !0x4000;
    (header[0] == 0x45 && header[9] == protocol).then(|| (cut, &packet[20..]))
}

/// What is behind the header of an IPv4 packet that is whole.
pub fn whole_v4(frame: &Frame, protocol: u8) -> Option<&[u8]> {
    in_v4(of_type(frame, IPV4)?, protocol).filter(|(cut, _)| *cut == 0).map(|(_, rest)| rest)
}

/// What is behind these headers of an IPv6 packet, each of which says how long it is.
pub fn in_v6<'a>(frame: &'a Frame, headers: &[u8], protocol: u8) -> Option<&'a [u8]> {
    let packet = of_type(frame, IPV6)?;
    let mut rest = packet.get(40..)?;
    let mut next = packet[6];
    for header in headers {
        let len = if next == FRAGMENT { 8 } else { 8 * (usize::from(*rest.get(1)?) + 1) };
        if next != *header || rest.len() < len {
            return None;
        }
        next = rest[0];
        rest = &rest[len..];
    }
    (next == protocol).then_some(rest)
}

/// Whether ports are these.
pub fn ports(segment: &[u8], from: u16, to: u16) -> bool {
    segment.len() >= 8 && segment[..4] == [from, to].map(u16::to_be_bytes).concat()
}

pub fn to_port(segment: &[u8]) -> bool {
    ports(segment, SOURCE_PORT, PORT)
}

/// Where it goes to, and whether there is anything in a segment of TCP.
pub fn has_data(segment: &[u8], len: usize) -> bool {
    segment.len() > 20
        && segment[2..4] == PORT.to_be_bytes()
        && segment.len() - 4 * usize::from(segment[12] >> 4) == len
}

pub fn is_udp4(frame: &Frame) -> bool {
    frame.tag.is_none() && whole_v4(frame, UDP).is_some_and(to_port)
}

pub fn is_udp6(frame: &Frame) -> bool {
    frame.tag.is_none() && in_v6(frame, &[], UDP).is_some_and(to_port)
}

pub fn is_extended(frame: &Frame, headers: &[u8]) -> bool {
    in_v6(frame, headers, UDP).is_some_and(to_port)
}

pub fn is_tcp4(frame: &Frame, len: usize) -> bool {
    whole_v4(frame, TCP).is_some_and(|segment| has_data(segment, len))
}

pub fn is_tcp6(frame: &Frame, len: usize) -> bool {
    in_v6(frame, &[], TCP).is_some_and(|segment| has_data(segment, len))
}

/// The flags of a segment between the ports of connections.
pub fn has_flags(frame: &Frame, port: u16, flags: u8) -> bool {
    whole_v4(frame, TCP).is_some_and(|segment| ports(segment, CLIENT_PORT, port) && segment.get(13) == Some(&flags))
}

/// Whether it is the first fragment of those to a port.
pub fn is_first4(frame: &Frame, port: u16) -> bool {
    of_type(frame, IPV4)
        .and_then(|packet| in_v4(packet, UDP))
        .is_some_and(|(cut, rest)| cut == MORE_V4 && ports(rest, SOURCE_PORT, port))
}

/// Whether it is a later one, which looks as if it were to [`PORT`], though it has no UDP header.
pub fn is_later4(frame: &Frame) -> bool {
    of_type(frame, IPV4)
        .and_then(|packet| in_v4(packet, UDP))
        .is_some_and(|(cut, rest)| cut & 0x1fff != 0 && to_port(rest))
}

/// The offset of a fragment, and whether there are more, and what is behind.
pub fn cut_v6(frame: &Frame) -> Option<(u16, &[u8])> {
    let rest = in_v6(frame, &[FRAGMENT], UDP)?;
    let header = &of_type(frame, IPV6)?[40..];
    Some((u16::from_be_bytes([header[2], header[3]]), rest))
}

pub fn is_first6(frame: &Frame, port: u16) -> bool {
    cut_v6(frame).is_some_and(|(cut, rest)| cut == 1 && ports(rest, SOURCE_PORT, port))
}

pub fn is_later6(frame: &Frame) -> bool {
    cut_v6(frame).is_some_and(|(cut, rest)| cut >> 3 != 0 && to_port(rest))
}

/// What IPv4 says of the first fragment of several.
pub const MORE_V4: u16 = 0x2000;

pub const CTAGGED: Option<(u16, u16)> = Some((CTAG, VLAN));
pub const STAGGED: Option<(u16, u16)> = Some((STAG, SERVICE_VLAN));

/// Whether it is a datagram once the tag that it must have beside it is gone.
pub fn is_beside(frame: &Frame, tag: Option<(u16, u16)>, inner: impl Fn(&Frame) -> bool) -> bool {
    frame.tag == tag && inner(&Frame { tag: None, bytes: frame.bytes.clone() })
}

/// Whether it has this tag in its bytes, and none beside.
pub fn is_within(frame: &Frame, (kind, tci): (u16, u16), inner: impl Fn(&Frame) -> bool) -> bool {
    frame.tag.is_none() && behind_tag(frame, kind, tci).is_some_and(|frame| inner(&frame))
}

pub fn is_vxlan(frame: &Frame) -> bool {
    whole_v4(frame, UDP).is_some_and(|outer| {
        let inner = Frame { tag: None, bytes: outer.get(16..).unwrap_or_default().to_vec() };
        outer[2..4] == 4_789_u16.to_be_bytes() && is_udp4(&inner)
    })
}

pub fn is_ipip(frame: &Frame) -> bool {
    let inner = whole_v4(frame, IPIP).and_then(|inner| in_v4(inner, UDP));
    inner.is_some_and(|(cut, datagram)| cut == 0 && to_port(datagram))
}

/// Whether it is what [`SEGMENTS`](super::SEGMENTS) datagrams are as one, or one of them.
pub fn is_udp_gso(frame: &Frame) -> bool {
    let len = frame.bytes.len() - (14 + 20 + 8);
    is_udp4(frame) && (len == super::SEGMENTS * super::SEGMENT || len == super::SEGMENT)
}

//! Frames as they are on a device, and what the standard library's sockets can't be asked for.
#![allow(unsafe_code, reason = "system calls that neither the standard library nor a dependency has")]

use std::ffi::{c_int, c_ulong, c_void};
use std::fs::File;
use std::io;
use std::net::{SocketAddrV4, TcpStream};
use std::os::fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::ptr;

use libbpf_rs::{TC_INGRESS, TcHookBuilder, libbpf_sys};

use crate::support::would_block;

const AF_INET: c_int = 2;
const AF_PACKET: c_int = 17;
const SOCK_STREAM: c_int = 1;
const SOCK_RAW: c_int = 3;
const SOCK_CLOEXEC: c_int = 0o2000000;
const MSG_DONTWAIT: c_int = 0x40;
const MSG_ERRQUEUE: c_int = 0x2000;
const MSG_ZEROCOPY: c_int = 0x400_0000;
const ETH_P_ALL: u16 = 3;
const SOL_PACKET: c_int = 263;
const PACKET_AUXDATA: c_int = 8;
const PACKET_OUTGOING: u8 = 4;
const TP_STATUS_VLAN_VALID: u32 = 1 << 4;
const SIOCGIFINDEX: c_ulong = 0x8933;
const SIOCETHTOOL: c_ulong = 0x8946;
const ETHTOOL_GFLAGS: u32 = 0x25;
const ETHTOOL_SFLAGS: u32 = 0x26;
const ETH_FLAG_TXVLAN: u32 = 1 << 7;

pub const SOL_SOCKET: c_int = 1;
pub const SOL_UDP: c_int = 17;
pub const IPPROTO_IPV6: c_int = 41;
pub const SO_REUSEADDR: c_int = 2;
pub const SO_LINGER: c_int = 13;
pub const SO_ZEROCOPY: c_int = 60;
pub const UDP_SEGMENT: c_int = 103;
pub const IPV6_HOPOPTS: c_int = 54;

#[repr(C)]
#[derive(Default)]
struct LinkAddress {
    family: u16,
    protocol: u16,
    interface: c_int,
    hardware: u16,
    packet: u8,
    len: u8,
    address: [u8; 8],
}

#[repr(C)]
struct Buffer {
    start: *mut c_void,
    len: usize,
}

#[repr(C)]
struct Message {
    name: *mut c_void,
    name_len: u32,
    buffers: *mut Buffer,
    buffer_count: usize,
    control: *mut c_void,
    control_len: usize,
    flags: c_int,
}

/// Of which only the name and what lies behind it is used here.
#[repr(C)]
union InterfaceAnswer {
    index: c_int,
    data: *mut c_void,
    room: [u64; 3],
}

#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    answer: InterfaceAnswer,
}

unsafe extern "C" {
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn bind(socket: c_int, address: *const c_void, len: u32) -> c_int;
    fn connect(socket: c_int, address: *const c_void, len: u32) -> c_int;
    fn setsockopt(socket: c_int, level: c_int, name: c_int, value: *const c_void, len: u32) -> c_int;
    fn send(socket: c_int, data: *const c_void, len: usize, flags: c_int) -> isize;
    fn recvmsg(socket: c_int, message: *mut Message, flags: c_int) -> isize;
    fn sendfile(to: c_int, from: c_int, offset: *mut i64, len: usize) -> isize;
    fn ioctl(file: c_int, request: c_ulong, ...) -> c_int;
}

#[track_caller]
fn done(what: &str, result: c_int) {
    assert!(result >= 0, "{what}: {}", io::Error::last_os_error());
}

#[track_caller]
fn open(domain: c_int, kind: c_int, protocol: c_int) -> OwnedFd {
    // SAFETY: it takes numbers only.
    let fd = unsafe { socket(domain, kind | SOCK_CLOEXEC, protocol) };
    done("socket()", fd);
    // SAFETY: it has just been opened, and nobody else knows of it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Sets an option of a socket.
#[track_caller]
pub fn set_option(socket: &impl AsFd, level: c_int, name: c_int, value: &[u8]) {
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel reads as many bytes as there are.
    let result = unsafe { setsockopt(fd, level, name, value.as_ptr().cast(), value.len() as u32) };
    done(&format!("option {name} of level {level}"), result);
}

/// The number of a device of the thread's host.
#[track_caller]
fn index(device: &str) -> c_int {
    let mut request = request(device, InterfaceAnswer { room: [0; 3] });
    let any = open(AF_INET, 2, 0);
    // SAFETY: the request is as large as the kernel's.
    done(device, unsafe { ioctl(any.as_raw_fd(), SIOCGIFINDEX, &raw mut request) });
    // SAFETY: that is what was asked for.
    unsafe { request.answer.index }
}

fn request(device: &str, answer: InterfaceAnswer) -> InterfaceRequest {
    let mut name = [0; 16];
    name[..device.len()].copy_from_slice(device.as_bytes());
    InterfaceRequest { name, answer }
}

/// Whether a device of the thread's host takes VLAN tags beside the packet, or finds them in its bytes.
#[track_caller]
pub fn offload_tags(device: &str, offload: bool) {
    let any = open(AF_INET, 2, 0);
    let flags = |command: u32, flags: u32| {
        let mut value = [command, flags];
        let mut request = request(device, InterfaceAnswer { data: value.as_mut_ptr().cast() });
        // SAFETY: the request is as large as the kernel's, and points to the two words that these commands have.
        done("ethtool", unsafe { ioctl(any.as_raw_fd(), SIOCETHTOOL, &raw mut request) });
        value[1]
    };
    let before = flags(ETHTOOL_GFLAGS, 0);
    let wanted = if offload { before | ETH_FLAG_TXVLAN } else { before & !ETH_FLAG_TXVLAN };
    flags(ETHTOOL_SFLAGS, wanted);
    assert_eq!(flags(ETHTOOL_GFLAGS, 0), wanted, "the device does as it likes");
}

/// A frame as a device has it: the tag that is beside its bytes, if there is one, and the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Its type, 0x8100 or 0x88a8, and what it says.
    pub tag: Option<(u16, u16)>,
    pub bytes: Vec<u8>,
}

/// Sends frames over a device as they are given, and sees all of its frames.
#[derive(Debug)]
pub struct Wire(OwnedFd);

impl Wire {
    /// Puts frames on a device of the thread's host.
    pub fn open(device: &str) -> Self {
        Self::bound(device, 0)
    }

    /// Sees the frames of a device of the thread's host from now on.
    pub fn tap(device: &str) -> Self {
        Self::bound(device, ETH_P_ALL)
    }

    #[track_caller]
    fn bound(device: &str, protocol: u16) -> Self {
        // Sees nothing until it is bound to a device.
        let wire = Self(open(AF_PACKET, SOCK_RAW, 0));
        set_option(&wire.0, SOL_PACKET, PACKET_AUXDATA, &1_u32.to_ne_bytes());
        let address = LinkAddress {
            family: AF_PACKET as u16,
            protocol: protocol.to_be(),
            interface: index(device),
            ..LinkAddress::default()
        };
        // SAFETY: the address is one of packet sockets, of its size.
        done(device, unsafe { bind(wire.0.as_raw_fd(), (&raw const address).cast(), 20) });
        wire
    }

    #[track_caller]
    pub fn send(&self, frame: &[u8]) {
        send_flagged(&self.0, frame, 0);
    }

    /// What the device has got to send, and what it has received, since the last time.
    #[track_caller]
    pub fn seen(&self) -> (Vec<Frame>, Vec<Frame>) {
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        let mut buffer = vec![0; 1 << 17];
        loop {
            let mut from = LinkAddress::default();
            let (len, control) = match receive(&self.0, &raw mut from, &mut buffer, MSG_DONTWAIT) {
                Ok(received) => received,
                Err(error) if would_block(&error) => return (sent, received),
                Err(error) => panic!("a tap: {error}"),
            };
            let [_, level, kind, status, ..] = control;
            assert_eq!((level, kind), (SOL_PACKET as u32, PACKET_AUXDATA as u32), "the auxiliary data");
            let [tci, tpid] = [control[7] as u16, (control[7] >> 16) as u16];
            let tag = (status & TP_STATUS_VLAN_VALID != 0).then_some((tpid, tci));
            let frame = Frame { tag, bytes: buffer[..len].to_vec() };
            if from.packet == PACKET_OUTGOING { sent.push(frame) } else { received.push(frame) }
        }
    }
}

/// One message, and the first words of its control data, without the upper half of the first.
fn receive(
    socket: &impl AsFd,
    from: *mut LinkAddress,
    buffer: &mut [u8],
    flags: c_int,
) -> io::Result<(usize, [u32; 8])> {
    let mut control = [0_u64; 16];
    let mut buffers = Buffer { start: buffer.as_mut_ptr().cast(), len: buffer.len() };
    let mut message = Message {
        name: from.cast(),
        name_len: if from.is_null() { 0 } else { size_of::<LinkAddress>() as u32 },
        buffers: &raw mut buffers,
        buffer_count: 1,
        control: control.as_mut_ptr().cast(),
        control_len: size_of_val(&control),
        flags: 0,
    };
    // SAFETY: everything that the message points to is as large as it says, and outlives the call.
    let len = unsafe { recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags) };
    if len < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut words = [0; 8];
    words[0] = control[0] as u32;
    for (n, word) in words[1..].iter_mut().enumerate() {
        *word = (control[1 + n / 2] >> (32 * (n % 2))) as u32;
    }
    Ok((len as usize, words))
}

#[track_caller]
fn send_flagged(socket: &impl AsFd, data: &[u8], flags: c_int) {
    // SAFETY: the kernel reads as many bytes as there are.
    let sent = unsafe { send(socket.as_fd().as_raw_fd(), data.as_ptr().cast(), data.len(), flags) };
    assert!(sent == data.len() as isize, "sent {sent} of {}: {}", data.len(), io::Error::last_os_error());
}

/// Sends without copying; the data may be used again when [`given_back`] says so.
#[track_caller]
pub fn send_uncopied(socket: &impl AsFd, data: &[u8]) {
    send_flagged(socket, data, MSG_ZEROCOPY);
}

/// Whether the kernel has given back what it was to send without copying, since the last time.
#[track_caller]
pub fn given_back(socket: &impl AsFd) -> bool {
    const SO_EE_ORIGIN_ZEROCOPY: u32 = 5;
    // Behind the control header's three words: errno, origin, and so on.
    match receive(socket, ptr::null_mut(), &mut [0; 1], MSG_ERRQUEUE | MSG_DONTWAIT) {
        Ok((_, [_, _, _, 0, origin, ..])) if origin & 0xff == SO_EE_ORIGIN_ZEROCOPY => true,
        Ok((_, control)) => panic!("another error: {control:x?}"),
        Err(error) if would_block(&error) => false,
        Err(error) => panic!("the queue of errors: {error}"),
    }
}

/// Sends from a file's beginning, whose pages become the packet's.
#[track_caller]
pub fn send_file(socket: &impl AsFd, file: &File, len: usize) {
    let mut offset = 0;
    // SAFETY: the offset is where the kernel reads and writes one.
    let sent = unsafe { sendfile(socket.as_fd().as_raw_fd(), file.as_raw_fd(), &raw mut offset, len) };
    assert!(sent == len as isize, "sent {sent} of {len}: {}", io::Error::last_os_error());
}

/// A connection from a given port, on which nothing remains when it is closed: it is reset.
#[track_caller]
pub fn connect_from(from: SocketAddrV4, to: SocketAddrV4) -> TcpStream {
    let address = |of: SocketAddrV4| {
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&(AF_INET as u16).to_ne_bytes());
        bytes[2..4].copy_from_slice(&of.port().to_be_bytes());
        bytes[4..8].copy_from_slice(&of.ip().octets());
        bytes
    };
    let socket = open(AF_INET, SOCK_STREAM, 0);
    set_option(&socket, SOL_SOCKET, SO_REUSEADDR, &1_u32.to_ne_bytes());
    // On, with no time to linger.
    set_option(&socket, SOL_SOCKET, SO_LINGER, &[1_u32, 0].map(u32::to_ne_bytes).concat());
    let (from, to) = (address(from), address(to));
    // SAFETY: the addresses are of IPv4, and of their size.
    done("bind()", unsafe { bind(socket.as_raw_fd(), from.as_ptr().cast(), 16) });
    // SAFETY: as above.
    done("connect()", unsafe { connect(socket.as_raw_fd(), to.as_ptr().cast(), 16) });
    TcpStream::from(socket)
}

/// Marks what arrives at a device of the thread's host with 1 if a part of it is outside its linear data.
#[track_caller]
pub fn mark_paged(device: &str) {
    const CONTEXT: u8 = 1;
    let op = |code, dst: u8, src: u8, off, imm| {
        let mut insn = libbpf_sys::bpf_insn { code, off, imm, ..Default::default() };
        insn.set_dst_reg(dst);
        insn.set_src_reg(src);
        insn
    };
    // Of struct __sk_buff: len at 0, mark at 8, data at 76, data_end at 80.
    let code = [
        op(0x61, 2, CONTEXT, 76, 0),
        op(0x61, 3, CONTEXT, 80, 0),
        op(0x61, 4, CONTEXT, 0, 0),
        // The verifier allows no larger steps.
        op(0x25, 4, 0, 4, 0xffff),
        op(0x0f, 2, 4, 0, 0),
        // if data + len <= data_end, there is nothing to mark.
        op(0xbd, 2, 3, 2, 0),
        op(0xb7, 5, 0, 0, 1),
        op(0x63, CONTEXT, 5, 8, 0),
        // TC_ACT_OK
        op(0xb7, 0, 0, 0, 0),
        op(0x95, 0, 0, 0, 0),
    ];
    // SAFETY: the strings end with a NUL, the instructions are as many as is said, and no options are given.
    let fd = unsafe {
        libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_SCHED_CLS,
            c"paged".as_ptr(),
            c"GPL".as_ptr(),
            code.as_ptr(),
            code.len() as libbpf_sys::size_t,
            ptr::null_mut(),
        )
    };
    done("loading a classifier", fd);
    // SAFETY: it has just been opened, and nobody else knows of it.
    let program = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut builder = TcHookBuilder::new(program.as_fd());
    builder.ifindex(index(device)).replace(true).handle(1).priority(1);
    let mut hook = builder.hook(TC_INGRESS);
    hook.create().expect("a new device has no classifiers");
    hook.attach().expect("the program is loaded");
}

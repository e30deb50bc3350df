//! A laboratory within the guest: hosts of their own, each a network namespace, joined by virtual Ethernet.
//!
//! Nothing but a test's own packets crosses the wires, so that they can be counted: hosts know their neighbours
//! beforehand, and announce nothing.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::support::{PATIENCE, eventually, run, would_block};

/// The only device of the hosts at both ends. In the middle they are called by where they lead: `left` and `right`.
pub const DEVICE: &str = "veth0";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ip {
    V4,
    V6,
}

impl Ip {
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    fn loopback(self) -> IpAddr {
        match self {
            Self::V4 => Ipv4Addr::LOCALHOST.into(),
            Self::V6 => Ipv6Addr::LOCALHOST.into(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Left = 1,
    Right = 2,
}

impl Side {
    pub const BOTH: [Self; 2] = [Self::Left, Self::Right];

    pub fn name(self) -> &'static str {
        match self {
            Self::Left => "left",
            Self::Right => "right",
        }
    }

    pub fn other(self) -> Self {
        match self {
            Self::Left => Self::Right,
            Self::Right => Self::Left,
        }
    }

    /// 10.77.0.1 and fd77::1 on the left, 10.77.0.2 and fd77::2 on the right.
    pub fn address(self, ip: Ip) -> IpAddr {
        match ip {
            Ip::V4 => Ipv4Addr::new(10, 77, 0, self as u8).into(),
            Ip::V6 => Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, self as u16).into(),
        }
    }

    /// The hardware address of this end, and that of the device in the middle that leads here.
    pub fn hardware(self) -> [String; 2] {
        [0, 1].map(|port| format!("02:77:00:00:0{port}:0{}", self as u8))
    }
}

/// Two hosts, left and right, and maybe a third between them; gone with all their devices and rules when this goes.
#[derive(Debug)]
pub struct Lab {
    name: String,
    hosts: &'static [&'static str],
    wires: Vec<Wire>,
}

/// Its ends: host, name and hardware address of each device.
type Wire = [(&'static str, &'static str, String); 2];

impl Lab {
    /// Left and right on one wire.
    pub fn new() -> Self {
        let ([left, _], [right, _]) = (Side::Left.hardware(), Side::Right.hardware());
        Self::build(&["left", "right"], vec![[("left", DEVICE, left), ("right", DEVICE, right)]])
    }

    /// Left and right, each on a wire to a host in the middle that forwards what comes from the other.
    pub fn forwarding() -> Self {
        let wire = |side: Side| {
            let [end, middle] = side.hardware();
            [(side.name(), DEVICE, end), ("middle", side.name(), middle)]
        };
        let lab = Self::build(&["left", "middle", "right"], vec![wire(Side::Left), wire(Side::Right)]);
        lab.middle(|| ["ipv4/ip_forward", "ipv6/conf/all/forwarding"].map(|name| sysctl(name, "1")));
        lab
    }

    // Starting programs is what takes long in a guest: as few as possible, each with much to do.
    fn build(hosts: &'static [&'static str], wires: Vec<Wire>) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("lab{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        // What has been made so far goes as well if the rest fails.
        let lab = Self { name, hosts, wires };
        let mut batch: String = hosts.iter().map(|host| format!("netns add {}\n", lab.namespace(host))).collect();
        for wire in &lab.wires {
            let [a, b] = wire.each_ref().map(|(host, device, address)| {
                format!("name {device} netns {} address {address}", lab.namespace(host))
            });
            batch += &format!("link add {a} type veth peer {b}\n");
        }
        feed("ip -batch -", &batch);
        for host in hosts {
            feed(&format!("ip -n {} -batch -", lab.namespace(host)), &lab.settings(host));
        }
        // Devices drop what they are to send until they have noticed that the other end is up as well.
        for host in hosts {
            let show = format!("ip -n {} -br link show type veth", lab.namespace(host));
            eventually("the links are up", || run(&show).lines().all(|line| line.contains(" UP ")));
        }
        lab
    }

    /// What a host needs to know: its addresses, and how it reaches others.
    fn settings(&self, host: &str) -> String {
        let mut batch = "link set lo up\n".to_owned();
        for [a, b] in &self.wires {
            let ((_, device, _), (there, _, next)) = match host {
                _ if host == a.0 => (a, b),
                _ if host == b.0 => (b, a),
                _ => continue,
            };
            // Nothing asks for neighbours, joins groups of them or looks for routers: all that makes packets.
            batch += &format!("link set {device} arp off multicast off addrgenmode none\nlink set {device} up\n");
            let target = if host == "left" || *there == "right" { Side::Right } else { Side::Left };
            for ip in Ip::BOTH {
                if host != "middle" {
                    batch += &format!("address add {} dev {device}\n", target.other().address(ip));
                }
                let target = target.address(ip);
                batch += &format!("route add {target} dev {device}\n");
                batch += &format!("neigh add {target} lladdr {next} nud permanent dev {device}\n");
            }
        }
        batch
    }

    /// The name of a host's network namespace.
    pub fn namespace(&self, host: &str) -> String {
        format!("{}-{host}", self.name)
    }

    /// Runs code in a thread on a host; sockets made there stay there, wherever they are used.
    fn on_host<T: Send>(&self, host: &str, code: impl FnOnce() -> T + Send) -> T {
        let path = format!("/run/netns/{}", self.namespace(host));
        let namespace = File::open(&path).unwrap_or_else(|error| panic!("no host {host}: {path}: {error}"));
        let enter = || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).expect("we are root");
            code()
        };
        // A thread of its own, so that the caller's never finds itself elsewhere.
        let result = thread::scope(|scope| scope.spawn(enter).join());
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    pub fn on<T: Send>(&self, side: Side, code: impl FnOnce() -> T + Send) -> T {
        self.on_host(side.name(), code)
    }

    pub fn left<T: Send>(&self, code: impl FnOnce() -> T + Send) -> T {
        self.on(Side::Left, code)
    }

    pub fn right<T: Send>(&self, code: impl FnOnce() -> T + Send) -> T {
        self.on(Side::Right, code)
    }

    /// Where there is one.
    pub fn middle<T: Send>(&self, code: impl FnOnce() -> T + Send) -> T {
        self.on_host("middle", code)
    }

    /// A socket on the left and one on the right, connected to each other.
    pub fn udp_pair(&self, ip: Ip) -> (UdpSocket, UdpSocket) {
        let bind = |side: Side| self.on(side, || udp(side.address(ip)));
        connected(bind(Side::Left), bind(Side::Right))
    }

    /// A connection from the left to the right.
    pub fn tcp_pair(&self, ip: Ip) -> (TcpStream, TcpStream) {
        self.tcp_pair_to(ip, 0)
    }

    /// The same, to a given port.
    pub fn tcp_pair_to(&self, ip: Ip, port: u16) -> (TcpStream, TcpStream) {
        let listener = self.right(|| listener(Side::Right.address(ip), port));
        let left = self.left(|| connect(&listener));
        (left, accept(&listener))
    }

    /// How many packets one end has received, and how many it has sent.
    pub fn packets(&self, side: Side) -> (u64, u64) {
        self.on(side, || packets(DEVICE))
    }

    /// Holds back all that this end sends for so long.
    pub fn netem_delay(&self, side: Side, delay: Duration) {
        let delay = delay.as_micros();
        self.on(side, || run(&format!("tc qdisc replace dev {DEVICE} root netem delay {delay}us")));
    }

    /// Limits what this end sends; all but one or two packets wait, and none is dropped.
    pub fn tbf(&self, side: Side, kbit_per_second: u32) {
        let rate = format!("rate {kbit_per_second}kbit burst 2000 latency 60s");
        self.on(side, || run(&format!("tc qdisc replace dev {DEVICE} root tbf {rate}")));
    }

    /// Takes back the delay or limit of what this end sends.
    pub fn unimpaired(&self, side: Side) {
        self.on(side, || run(&format!("tc qdisc del dev {DEVICE} root")));
    }

    /// Lets all that this end receives and sends pass a classifier, which accepts it.
    pub fn ingress_filter(&self, side: Side) {
        self.on(side, || {
            run(&format!("tc qdisc add dev {DEVICE} clsact"));
            for direction in ["ingress", "egress"] {
                run(&format!("tc filter add dev {DEVICE} {direction} matchall action pass"));
            }
        });
    }

    /// How many packets have passed the classifiers of this end: received, and sent.
    pub fn filtered(&self, side: Side) -> (u64, u64) {
        let passed = |direction| {
            let filter = self.on(side, || run(&format!("tc -s filter show dev {DEVICE} {direction}")));
            // "Sent 3200 bytes 50 pkt (dropped 0, ..."
            number_before(&filter, " pkt")
        };
        (passed("ingress"), passed("egress"))
    }

    /// Drops datagrams that arrive at this end for a port.
    pub fn drop_rule(&self, side: Side, port: u16) {
        self.firewall(side, "dropping", &format!("udp dport {port} counter drop"));
    }

    /// How many datagrams the rule has dropped.
    pub fn dropped(&self, side: Side) -> u64 {
        self.counted(side, "dropping")
    }

    /// Lets all that arrives at this end pass so many rules, none of which says anything about it.
    pub fn slow_firewall(&self, side: Side, rules: usize) {
        self.firewall(side, "slow", &"meta mark 1 drop\n".repeat(rules));
    }

    /// Has this end track connections, and accept what belongs to one that has been answered.
    pub fn conntrack(&self, side: Side) {
        self.firewall(side, "tracking", "ct state established counter accept");
    }

    /// How many packets arrived that belong to an answered connection.
    pub fn established(&self, side: Side) -> u64 {
        self.counted(side, "tracking")
    }

    /// Counts what arrives at this end with a mark.
    pub fn count_marked(&self, side: Side) {
        self.firewall(side, "marked", "meta mark 1 counter");
    }

    /// How many packets had the mark.
    pub fn marked(&self, side: Side) -> u64 {
        self.counted(side, "marked")
    }

    fn firewall(&self, side: Side, table: &str, rules: &str) {
        let chain = format!("chain input {{\ntype filter hook input priority filter\n{rules}\n}}");
        self.on(side, || feed("nft -f -", &format!("table inet {table} {{\n{chain}\n}}\n")));
    }

    fn counted(&self, side: Side, table: &str) -> u64 {
        // "counter packets 5 bytes 300 drop"
        number_before(&self.on(side, || run(&format!("nft list table inet {table}"))), " bytes")
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // The wires by themselves, as a socket that is still open keeps its namespace, and all in it.
        for [(host, device, _), _] in &self.wires {
            let _ = fed(&format!("ip -n {} link del {device}", self.namespace(host)), "");
        }
        let batch: String = self.hosts.iter().map(|host| format!("netns del {}\n", self.namespace(host))).collect();
        let _ = fed("ip -force -batch -", &batch);
    }
}

/// Two sockets on loopback, connected to each other.
pub fn loopback_udp(ip: Ip) -> (UdpSocket, UdpSocket) {
    connected(udp(ip.loopback()), udp(ip.loopback()))
}

/// A connection on loopback.
pub fn loopback_tcp(ip: Ip) -> (TcpStream, TcpStream) {
    let listener = listener(ip.loopback(), 0);
    let client = connect(&listener);
    (client, accept(&listener))
}

fn udp(address: IpAddr) -> UdpSocket {
    udp_port((address, 0).into())
}

/// A socket with this port.
pub fn udp_port(address: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(address).unwrap_or_else(|error| panic!("{address}: {error}"));
    socket.set_read_timeout(Some(PATIENCE)).expect("any timeout goes");
    socket
}

fn connected(a: UdpSocket, b: UdpSocket) -> (UdpSocket, UdpSocket) {
    a.connect(b.local_addr().expect("it is bound")).expect("there is a route");
    b.connect(a.local_addr().expect("it is bound")).expect("there is a route");
    (a, b)
}

fn listener(address: IpAddr, port: u16) -> TcpListener {
    let listener = TcpListener::bind((address, port)).expect("a free port");
    // What has no timeout by itself gets one where it is accepted.
    listener.set_nonblocking(true).expect("it is a socket");
    listener
}

fn connect(listener: &TcpListener) -> TcpStream {
    let address = listener.local_addr().expect("it is bound");
    prompt(TcpStream::connect_timeout(&address, PATIENCE).expect("it listens"))
}

/// The next connection, once it is there.
pub fn accept(listener: &TcpListener) -> TcpStream {
    let mut accepted = None;
    eventually("it is connected", || match listener.accept() {
        Ok((stream, _)) => accepted.replace(stream).is_none(),
        Err(error) if would_block(&error) => false,
        Err(error) => panic!("accept: {error}"),
    });
    prompt(accepted.expect("just set"))
}

fn prompt(stream: TcpStream) -> TcpStream {
    stream.set_nodelay(true).expect("it is TCP");
    stream.set_read_timeout(Some(PATIENCE)).expect("any timeout goes");
    stream
}

/// Sends datagrams, each received before the next is sent.
#[track_caller]
pub fn send_datagrams(from: &UdpSocket, to: &UdpSocket, count: usize, payload: &[u8]) {
    for _ in 0..count {
        burst(from, to, 1, payload);
    }
}

/// Sends datagrams, and then receives them: no more than wait in the receiver's buffer, which are 80 of the largest.
#[track_caller]
pub fn burst(from: &UdpSocket, to: &UdpSocket, count: usize, payload: &[u8]) {
    for _ in 0..count {
        assert_eq!(from.send(payload).expect("sent"), payload.len());
    }
    let mut buffer = vec![0; payload.len() + 1];
    for n in 0..count {
        let len = to.recv(&mut buffer).unwrap_or_else(|error| panic!("received {n} of {count}: {error}"));
        assert!(buffer[..len] == *payload, "another datagram");
    }
}

/// Sends messages, each of which comes back before the next is sent.
#[track_caller]
pub fn tcp_messages(mut client: &TcpStream, mut server: &TcpStream, count: usize, message: &[u8]) {
    let mut buffer = vec![0; message.len()];
    for _ in 0..count {
        client.write_all(message).expect("sent");
        server.read_exact(&mut buffer).expect("received");
        server.write_all(&buffer).expect("answered");
        buffer.fill(0);
        client.read_exact(&mut buffer).expect("the answer");
        assert!(buffer == message, "another message");
    }
}

/// How many packets a device of the thread's host has received, and how many it has sent.
pub fn packets(device: &str) -> (u64, u64) {
    let devices = fs::read_to_string("/proc/thread-self/net/dev").expect("/proc is mounted");
    let mut lines = devices.lines().filter_map(|line| line.trim().strip_prefix(device)?.strip_prefix(':'));
    let line = lines.next().unwrap_or_else(|| panic!("no device {device}: {devices}"));
    // Bytes, packets and six others of what was received, then the same of what was sent.
    let numbers: Vec<u64> = line.split_whitespace().map(|number| number.parse().expect("a number")).collect();
    (numbers[1], numbers[9])
}

/// Sets a parameter of the thread's host.
pub fn sysctl(name: &str, value: &str) {
    fs::write(format!("/proc/sys/net/{name}"), value).unwrap_or_else(|error| panic!("{name}: {error}"));
}

/// Runs a command that reads its input, and must succeed.
#[track_caller]
pub fn feed(command: &str, input: &str) {
    let output = fed(command, input).unwrap_or_else(|error| panic!("{command}: {error}"));
    assert!(output.status.success(), "{command}: {} {}", output.status, String::from_utf8_lossy(&output.stderr));
}

fn fed(command: &str, input: &str) -> io::Result<Output> {
    let mut words = command.split(' ');
    let mut child = Command::new(words.next().expect("a program"));
    child.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn()?;
    // If it doesn't read to the end, it says why itself.
    let _ = child.stdin.take().expect("a pipe").write_all(input.as_bytes());
    child.wait_with_output()
}

/// The number that comes before the first such words.
#[track_caller]
fn number_before(text: &str, words: &str) -> u64 {
    let number = text.split_once(words).and_then(|(before, _)| before.rsplit(' ').next()?.parse().ok());
    number.unwrap_or_else(|| panic!("no number before{words}: {text}"))
}

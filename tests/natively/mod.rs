//! What tests on the machine that runs them have in common: a probe of raw tracepoints, and packets for it.

use std::net::UdpSocket;
use std::sync::Mutex;
use std::time::Duration;

use dwell::{Error, Hook, LatencyProbe, Span, Support};

/// Loopback is everybody's: packets of other tests would be counted, and some count what this process holds.
pub static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// From a device's queue to where its packets are received.
pub fn span_across() -> Span {
    Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("netif_receive_skb")).named("across")
}

/// The probe; `None` where this machine doesn't allow it, which must be explained.
pub fn possible(test: &str, attached: Result<LatencyProbe, Error>) -> Option<LatencyProbe> {
    attached
        .map_err(|error| {
            println!("{test}: not possible on this machine: {error}");
            let support = Support::probe();
            assert!(!support.can_trace_packets(), "{error}, but: {support}");
        })
        .ok()
}

/// A socket connected to itself, whose datagrams come back over the loopback device; reading from it has this timeout.
pub fn udp_to_itself(patience: Duration) -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(socket.local_addr().unwrap()).unwrap();
    socket.set_read_timeout(Some(patience)).unwrap();
    socket
}

//! How long does the kernel take to receive a packet? Shows ten calls of `ip_rcv`, with traffic of its own.
//!
//! Run it as root: `cargo build --example quickstart && sudo target/debug/examples/quickstart`

use std::net::UdpSocket;
use std::time::Duration;

use dwell::LatencyProbe;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // From here on, every call of the function counts.
    let probe = LatencyProbe::builder().function("ip_rcv").attach()?;

    // Ten packets to ourselves. Any other packet that this machine receives is measured as well.
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    for _ in 0..10 {
        socket.send_to(b"hello", socket.local_addr()?)?;
        socket.recv(&mut [0; 16])?;
    }

    for _ in 0..10 {
        let event = probe.events().recv_timeout(Duration::from_secs(5))?;
        println!("{event}");
    }

    // What became of every call: nothing is lost without a number saying so.
    println!("{}", probe.stop());
    Ok(())
}

//! Traffic to ourselves over 127.0.0.1, so that there is something to see on any machine.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::str::FromStr;
use std::time::Duration;

const PAYLOAD: [u8; 64] = [b'.'; 64];
/// Far more than a message to ourselves takes on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// What to send, and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    Udp(u64),
    Tcp(u64),
}

impl FromStr for Traffic {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (protocol, count) = text.split_once(':').ok_or("udp:N or tcp:N is needed")?;
        let count = count.parse().map_err(|_| format!("`{count}` is no number of messages"))?;
        match protocol {
            "udp" => Ok(Self::Udp(count)),
            "tcp" => Ok(Self::Tcp(count)),
            other => Err(format!("`{other}` is neither udp nor tcp")),
        }
    }
}

impl Traffic {
    /// Sends every message and receives it again.
    pub fn run(self) -> io::Result<()> {
        match self {
            Self::Udp(count) => udp(count),
            Self::Tcp(count) => tcp(count),
        }
    }
}

fn udp(count: u64) -> io::Result<()> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.connect(socket.local_addr()?)?;
    let mut buffer = PAYLOAD;
    for _ in 0..count {
        socket.send(&PAYLOAD)?;
        socket.recv(&mut buffer)?;
    }
    Ok(())
}

fn tcp(count: u64) -> io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut client = TcpStream::connect(listener.local_addr()?)?;
    let (mut server, _) = listener.accept()?;
    client.set_nodelay(true)?;
    server.set_read_timeout(Some(PATIENCE))?;
    let mut buffer = PAYLOAD;
    for _ in 0..count {
        client.write_all(&PAYLOAD)?;
        server.read_exact(&mut buffer)?;
    }
    Ok(())
}

//! Traffic of several kinds at once, over loopback, until it is stopped.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fastrand::Rng;
use rustix::process::setpriority_process;
use rustix::thread::gettid;

/// Threads that send and receive.
pub struct Load {
    done: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// Longer than anything takes here; shorter than anybody waits for the end.
const TIMEOUT: Duration = Duration::from_millis(50);

const KINDS: [fn(&AtomicBool) -> io::Result<()>; 6] = [ping_pong, flood, blocking, stream, connections, refused];

impl Load {
    /// Starts up to four threads.
    pub fn start(rng: &mut Rng) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let threads = (0..rng.u8(1..=4)).map(|_| {
            let kind = KINDS[rng.usize(..KINDS.len())];
            let done = Arc::clone(&done);
            thread::spawn(move || {
                // Attaching, reading and stopping go first: on two emulated CPUs little would be left for these.
                let _ = setpriority_process(Some(gettid()), 19);
                while !done.load(Ordering::Relaxed) {
                    kind(&done).expect("loopback works");
                }
            })
        });
        Self { threads: threads.collect(), done }
    }

    /// Waits until nothing is on its way any more.
    pub fn stop(mut self) {
        self.done.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().expect("loopback works");
        }
        // What TCP says at last, and the freeing of what was sent.
        thread::sleep(2 * TIMEOUT);
    }
}

/// Should the round have failed.
impl Drop for Load {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
    }
}

fn udp_to_itself() -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(socket.local_addr()?)?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    Ok(socket)
}

/// One datagram after the other.
fn ping_pong(done: &AtomicBool) -> io::Result<()> {
    let socket = udp_to_itself()?;
    for _ in 0..100 {
        if done.load(Ordering::Relaxed) {
            break;
        }
        socket.send(&[7; 32])?;
        let _ = socket.recv(&mut [0; 64]);
    }
    Ok(())
}

/// More than the socket takes.
fn flood(_: &AtomicBool) -> io::Result<()> {
    let socket = udp_to_itself()?;
    for _ in 0..300 {
        let _ = socket.send(&[7; 1400]);
    }
    thread::sleep(Duration::from_millis(2));
    Ok(())
}

/// A thread that waits for a datagram, on a socket and in a thread that soon are no more.
fn blocking(_: &AtomicBool) -> io::Result<()> {
    let socket = udp_to_itself()?;
    thread::scope(|scope| {
        let receiver = scope.spawn(|| socket.recv(&mut [0; 64]));
        thread::sleep(Duration::from_millis(3));
        socket.send(b"go")?;
        let _ = receiver.join();
        Ok(())
    })
}

/// A megabyte over TCP.
fn stream(done: &AtomicBool) -> io::Result<()> {
    let (mut here, mut there) = connection()?;
    for _ in 0..64 {
        if done.load(Ordering::Relaxed) {
            break;
        }
        here.write_all(&[7; 16 << 10])?;
        there.read_exact(&mut [0; 16 << 10])?;
    }
    Ok(())
}

/// Connections that are gone as soon as they are there.
fn connections(_: &AtomicBool) -> io::Result<()> {
    let (mut here, mut there) = connection()?;
    here.write_all(b"x")?;
    there.read_exact(&mut [0])?;
    drop(there);
    let _ = here.read(&mut [0]);
    Ok(())
}

fn connection() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let here = TcpStream::connect(listener.local_addr()?)?;
    here.set_read_timeout(Some(100 * TIMEOUT))?;
    Ok((here, listener.accept()?.0))
}

/// Datagrams that nobody receives.
fn refused(_: &AtomicBool) -> io::Result<()> {
    let (socket, gone) = (udp_to_itself()?, udp_to_itself()?.local_addr()?);
    for _ in 0..20 {
        let _ = socket.send_to(b"x", gone);
    }
    thread::sleep(Duration::from_millis(1));
    Ok(())
}

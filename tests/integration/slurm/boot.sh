# Slurm on five hosts: `ctl`, and the nodes n1 to n4, each a network namespace with a name of its own.
# $1: Debian's packages, unpacked. $2: a folder for configuration, state and logs.
set -eu
root=$1 folder=$2
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=$root/usr:/usr" /usr
mount -t tmpfs tmpfs /run
mkdir -p /run/munge /run/netns "$folder/state"
hostname ctl
ip link set lo up
ip link add bridge type bridge
ip address add 10.9.0.1/24 dev bridge
ip link set bridge up
printf '127.0.0.1 localhost\n10.9.0.1 ctl\n' >"$folder/hosts"
for number in 1 2 3 4; do echo "10.9.0.1$number n$number" >>"$folder/hosts"; done
mount --bind "$folder/hosts" /etc/hosts

head -c 1024 /dev/urandom >/run/munge/key
chmod 400 /run/munge/key
munged --key-file=/run/munge/key --log-file=/run/munge/log --pid-file=/run/munge/pid \
  --seed-file=/run/munge/seed

export SLURM_CONF=$folder/slurm.conf
cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=ctl
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MailProg=/bin/true
StateSaveLocation=$folder/state
SlurmctldLogFile=$folder/slurmctld.log
SlurmctldPidFile=/run/slurmctld.pid
SlurmdSpoolDir=$folder/spool.%n
SlurmdPidFile=/run/slurmd.%n.pid
SlurmdLogFile=$folder/slurmd.%n.log
NodeName=n[1-4] CPUs=2 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:4 State=UP
CONF
slurmctld -c

for number in 1 2 3 4; do
  ip netns add "n$number"
  ip link add "to-n$number" type veth peer name eth0 netns "n$number"
  ip link set "to-n$number" master bridge up
  ip -n "n$number" address add "10.9.0.1$number/24" dev eth0
  ip -n "n$number" link set eth0 up
  ip -n "n$number" link set lo up
  nsenter "--net=/run/netns/n$number" unshare --uts sh -c \
    "hostname n$number; echo \$\$ >$folder/n$number.pid; exec slurmd -D" >>"$folder/slurmd.log" 2>&1 &
done
: >"$folder/booted"
wait

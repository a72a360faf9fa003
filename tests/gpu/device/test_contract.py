"""The devices that Conduit has keep the contract of one."""

from conduit.plane.device.cuda import CudaDevice
from conduit.plane.device.host import HostDevice
from conduit.testing.suites.device import DeviceTests
from tests.gpu.device.conftest import INTERPRETED


class TestDevice(DeviceTests):
    def make(self):
        return HostDevice(1 << 26) if INTERPRETED else CudaDevice("cuda")
